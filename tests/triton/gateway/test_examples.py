"""Every file of examples/ runs as it is against a real server, and says what the server said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_client import Client
from tests.triton.gateway.frameworks import frameworks_python
from tests.triton.gateway.running import Gateway
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

EXECUTE = """
import json, sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(book)
nbclient.NotebookClient(book, timeout=60).execute()
print(json.dumps([output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])]))
"""


@pytest.fixture
def examples(project_root: Path) -> Path:
    return project_root / "examples"


@pytest.fixture
def environment(gateway: Gateway, tiny_server: OracleServer, tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "DDTREE_URL": tiny_server.triton.grpc_url,
        "OPENAI_BASE_URL": f"{gateway.url}/v1",
        "OPENAI_API_KEY": "none",
        "PYTHONIOENCODING": "utf-8",
        "NLTK_DATA": str(tmp_path),
    }


def output_of(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def greedy(server: OracleServer, max_tokens: int, **prompt: object) -> str:
    with Client(server.triton.grpc_url) as client:
        return client.generate(max_tokens=max_tokens, **prompt).text  # type: ignore[arg-type]


def test_python_sync(examples: Path, environment: dict[str, str], tiny_server: OracleServer) -> None:
    output = output_of([sys.executable, str(examples / "python_sync.py")], environment)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    assert output.startswith(greedy(tiny_server, 48, messages=messages) + "\n48 tokens in ")
    assert output.endswith("the same without drafts: True\n")


def test_python_async(examples: Path, environment: dict[str, str], tiny_server: OracleServer) -> None:
    output = output_of([sys.executable, str(examples / "python_async.py")], environment)
    prompt = "The capital of France is"
    assert f"{prompt!r} -> {greedy(tiny_server, 16, prompt=prompt)!r}\n" in output
    assert "first chunk: " in output


def test_openai_package(examples: Path, environment: dict[str, str], tiny_server: OracleServer) -> None:
    output = output_of([sys.executable, str(examples / "openai_package.py")], environment)
    messages = [{"role": "user", "content": "Name three colours."}]
    assert output.startswith(greedy(tiny_server, 32, messages=messages) + "\naccepted draft tokens: ")
    assert "by schema: {'colour': " in output
    assert output.endswith("refused: tools\n")


def test_curl(examples: Path, environment: dict[str, str], tiny_server: OracleServer) -> None:
    models, chat, *events = output_of([str(examples / "curl.sh")], environment).split("\n")
    assert json.loads(models)["data"][0]["id"] == "ddtree"
    messages = [{"role": "user", "content": "Name three colours."}]
    assert json.loads(chat)["choices"][0]["message"]["content"] == greedy(tiny_server, 16, messages=messages)
    data = [event.removeprefix("data: ") for event in events if event]
    assert data.pop() == "[DONE]"
    text = "".join(json.loads(each)["choices"][0]["text"] for each in data)
    assert text == greedy(tiny_server, 8, prompt="The sky is")


def test_langchain(examples: Path, environment: dict[str, str], tiny_server: OracleServer) -> None:
    output = output_of([str(frameworks_python()), str(examples / "langchain_chat.py")], environment)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    text = greedy(tiny_server, 32, messages=messages)
    assert output.startswith(f"invoke: {text!r}\nusage: 32\nstream: {text!r}\nstructured: {{'name': ")


def test_llama_index(examples: Path, environment: dict[str, str], tiny_server: OracleServer) -> None:
    output = output_of([str(frameworks_python()), str(examples / "llama_index_chat.py")], environment)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    text = greedy(tiny_server, 32, messages=messages)
    assert output.startswith(f"chat: {text!r}\nstream: {text!r}\ncomplete: ")


def test_the_notebook(examples: Path, environment: dict[str, str], tiny_server: OracleServer) -> None:
    python = str(frameworks_python())
    texts = json.loads(output_of([python, "-c", EXECUTE, str(examples / "speculation.ipynb")], environment))
    assert "".join(texts).startswith(greedy(tiny_server, 32, prompt="The sky is"))
    assert "the same text: True\n" in "".join(texts)
    assert "'draft_mode': 'tree', 'tree_budget': 32" in "".join(texts)


def test_every_example_has_a_test(examples: Path) -> None:
    names = {file.name for file in examples.iterdir() if file.suffix in (".py", ".sh", ".ipynb")}
    source = Path(__file__).read_text(encoding="utf-8")
    assert names
    assert all(f'"{name}"' in source for name in names)
