(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const rounds = data.rounds.filter((each) => each.drafting !== "prefill");
  const at = (id) => document.getElementById(id);
  const STAGES = ["draft", "build_tree", "verify", "commit"];
  const WHY = {
    drafted: "drafted", empty_tree: "no node was worth its cost", off: "drafting is off for this request",
    gave_up: "the drafter could not hold the sequence", last_token: "only one more token was allowed",
    drafter_lost: "the drafter had lost the session", paused: "drafting did not pay at the moment",
  };
  let current = -1;

  function make(name, className, ...content) {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.append(...content);
    return made;
  }

  const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

  function writeHead() {
    const total = data.summary, settings = Object.entries(data.options).map(([name, value]) => `${name} ${value}`);
    at("facts").textContent = [
      `${data.model} at ${data.address}`, ...settings, `${total.rounds} rounds`,
      `acceptance length ${number(total.acceptance_length, 2)}`, `${number(data.tokens_per_second, 1)} tokens/s`,
      `ended by ${data.finish_reason}`,
    ].join(" · ");
    at("prompt").textContent = data.prompt;
  }

  // Texts are cut where characters end, so a token can have none of its own, as special ones have none.
  function writeAnswer() {
    const answer = document.createDocumentFragment();
    for (const round of data.rounds) {
      round.spans = round.emitted.ids.map((id, index) => {
        const accepted = round.drafting !== "prefill" && index < round.accepted_path.length;
        const kind = round.drafting === "prefill" ? "prefill" : accepted ? "accepted" : "bonus";
        const span = make("span", `token ${kind}${round.round % 2 ? " odd" : ""}`);
        span.dataset.round = round.round;
        const text = round.emitted.texts[index];
        if (text === "") span.append(make("span", "sign", "∘"));
        else if (/^\n+$/.test(text)) span.append(make("span", "sign", "↵"), text);
        else span.append(text);
        span.title = `token ${id}, ${round.round ? `${kind} in round ${round.round}` : "of the prefill"}`;
        answer.append(span);
        return span;
      });
    }
    at("answer").append(answer);
    at("answer").addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (token && token.dataset.round > 0) show(Number(token.dataset.round) - 1);
    });
  }

  function drawStrip() {
    const most = Math.max(1, ...rounds.map((each) => each.emitted.ids.length));
    let accepted = "", bonus = "";
    rounds.forEach((each, index) => {
      const all = each.emitted.ids.length, drafted = Math.min(all, each.accepted_path.length);
      accepted += `M${index + 0.08} ${most}v${-drafted}h.84v${drafted}z`;
      bonus += `M${index + 0.08} ${most - drafted}v${drafted - all}h.84v${all - drafted}z`;
    });
    const strip = at("strip");
    strip.setAttribute("viewBox", `0 0 ${Math.max(1, rounds.length)} ${most}`);
    strip.append(Tree.element("path", { class: "accepted", d: accepted }),
      Tree.element("path", { class: "bonus", d: bonus }),
      Tree.element("rect", { class: "cursor", y: 0, width: 1, height: most }));
    strip.addEventListener("click", (event) => {
      const box = strip.getBoundingClientRect();
      show(Math.floor((event.clientX - box.left) / box.width * rounds.length));
    });
  }

  function tell(round) {
    const parts = [`${round.nodes_verified} nodes verified, ${round.accepted_path.length} accepted, `
      + `then ${JSON.stringify(round.bonus.text)}: ${round.emitted.ids.length} tokens emitted`];
    if (round.drafting !== "drafted") parts.unshift(`no tree: ${WHY[round.drafting] ?? round.drafting}`);
    parts.push(`budget ${round.tree_budget < 0 ? "chosen by cost" : round.tree_budget}`);
    parts.push(`${round.committed} tokens committed before`);
    if (round.sequences > 1) parts.push(`shared by ${round.sequences} sequences`);
    return `${parts.join(" · ")}.`;
  }

  function drawTimes(round) {
    const bar = make("div", "stack"), list = make("ul", "legend");
    for (const stage of STAGES) {
      const ms = round.stage_ms[stage] ?? 0, part = make("span", stage), line = make("li", "");
      part.style.flexGrow = ms;
      part.title = `${stage} ${ms.toFixed(2)} ms`;
      line.append(make("span", `swatch ${stage}`), ` ${stage} ${ms.toFixed(2)} ms`);
      if (stage === "verify") line.append(` (moving the cache ${round.cache_commit_ms.toFixed(2)} ms of it)`);
      bar.append(part);
      list.append(line);
    }
    bar.setAttribute("aria-hidden", "true"); // the list says the same
    at("times").replaceChildren(bar, list);
  }

  function keepInView(box, span) {
    const inner = span.getBoundingClientRect(), outer = box.getBoundingClientRect();
    if (inner.top < outer.top || inner.bottom > outer.bottom) {
      box.scrollTop += inner.top - outer.top - outer.height / 2;
    }
  }

  function show(index) {
    const wanted = Math.min(Math.max(index, 0), rounds.length - 1);
    if (wanted === current || wanted < 0) return;
    rounds[current]?.spans.forEach((span) => span.classList.remove("current"));
    current = wanted;
    const round = rounds[current];
    round.spans.forEach((span) => span.classList.add("current"));
    if (round.spans.length) keepInView(at("answer"), round.spans[0]);
    at("round-heading").textContent = `Round ${current + 1} of ${rounds.length}`;
    at("slider").value = current + 1;
    at("told").textContent = tell(round);
    at("canvas").replaceChildren(Tree.draw(round));
    at("strip").querySelector(".cursor").setAttribute("x", current);
    drawTimes(round);
    at("first").disabled = at("previous").disabled = current === 0;
    at("next").disabled = at("last").disabled = current === rounds.length - 1;
    history.replaceState(null, "", `#round-${current + 1}`);
  }

  function gauge(share, className, mark) {
    const cell = make("td", "gauge"), filled = make("div", className);
    filled.style.width = `${Math.min(1, share) * 100}%`;
    cell.append(filled);
    if (mark !== undefined) {
      const line = make("div", "mark");
      line.style.width = `${Math.min(1, mark) * 100}%`;
      line.title = `the drafter's probabilities promised ${(mark * 100).toFixed(0)}%`;
      cell.append(line);
    }
    return cell;
  }

  function table(place, caption, heads, lines) {
    const made = make("table", "", make("caption", "", caption)), head = make("tr", "");
    heads.forEach((each) => {
      const cell = make("th", "", each);
      cell.scope = "col";
      head.append(cell);
    });
    made.append(make("thead", "", head), make("tbody", "", ...lines.map((line) => make("tr", "",
      ...line.map((each) => (typeof each === "string" ? make("td", "", each) : each))))));
    at(place).replaceChildren(made);
  }

  function writeSummary() {
    const total = data.summary, share = (part, all) => (all ? part / all : 0);
    table("by-depth", "Accepted at each depth", ["depth", "rounds", "accepted", "and what the drafter promised: |"],
      total.by_depth.map((each) => {
        const own = share(each.accepted, each.rounds);
        return [`${each.depth}`, `${each.rounds}`, `${(own * 100).toFixed(0)}%`,
          gauge(own, "", share(each.expected, each.rounds))];
      }));
    const often = Math.max(1, ...total.tokens_per_round.map(([, count]) => count));
    table("per-round", "Tokens per round", ["tokens", "rounds", ""],
      total.tokens_per_round.map(([tokens, count]) => [`${tokens}`, `${count}`, gauge(count / often, "")]));
    const all = STAGES.reduce((sum, stage) => sum + total.stage_ms[stage], 0);
    const caption = "Where the time went"
      + (total.most_sequences > 1 ? ` (rounds shared by up to ${total.most_sequences} sequences)` : "");
    table("stages", caption, ["stage", "ms", "ms a round", "share"], STAGES.map((stage) => {
      const ms = total.stage_ms[stage];
      return [stage, ms.toFixed(0), share(ms, total.rounds).toFixed(2), gauge(share(ms, all), stage)];
    }));
    table("drafting", "Did rounds draft?", ["", "rounds"],
      Object.entries(total.drafting).map(([why, count]) => [WHY[why] ?? why, `${count}`]));
  }

  function watchTheme() {
    const button = at("theme"), system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    const write = () => button.setAttribute("aria-pressed", String(isDark()));
    button.addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      write();
    });
    system.addEventListener("change", write);
    write();
  }

  const STEPS = { ArrowLeft: () => current - 1, ArrowRight: () => current + 1, Home: () => 0, End: () => rounds.length };

  function listen() {
    document.addEventListener("keydown", (event) => {
      const step = STEPS[event.key];
      if (!step || event.ctrlKey || event.altKey || event.metaKey || event.target === at("slider")) return;
      event.preventDefault();
      // The tree may be wider than the page: with Shift the arrows move it.
      if (event.shiftKey) at("canvas").scrollLeft += event.key === "ArrowLeft" ? -120 : 120;
      else show(step());
    });
    at("slider").max = Math.max(1, rounds.length);
    at("slider").addEventListener("input", () => show(Number(at("slider").value) - 1));
    at("first").addEventListener("click", () => show(0));
    at("previous").addEventListener("click", () => show(current - 1));
    at("next").addEventListener("click", () => show(current + 1));
    at("last").addEventListener("click", () => show(rounds.length - 1));
  }

  writeHead();
  writeAnswer();
  drawStrip();
  writeSummary();
  watchTheme();
  listen();
  if (rounds.length) show(Number(/^#round-(\d+)$/.exec(location.hash)?.[1] ?? 1) - 1);
  else at("told").textContent = "The answer ended before its first round.";
})();
