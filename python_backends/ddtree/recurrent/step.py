"""One packed step through the recurrent layers: which rows follow which, and what becomes of the states.

Rows of all sequences stand one after another, as in the attention's step plan. A step either *stages* (every
sequence brings a tree or a chain, the states stay as they are, and `commit` later takes one path of each) or
*reads* (every sequence brings a chain that is kept whole: a prompt's chunk, whose states move on layer by
layer).

All indices are made once per step and shared by the layers. They come from sequences on the host, packed
without a gap, or from rows on the device: then each sequence has as many rows, of which some are padding, and
a place without rows has a state all the same, which may be another's: it is never written.

This module knows indices and the pool; not models, sessions or acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ddtree.device.rows import DeviceRows
from ddtree.recurrent.gated_delta import Rows, Stop, commit_path, path_decays, read_chain, stage_tree
from ddtree.recurrent.layer import LayerInputs, LayerRows, LayerWeights
from ddtree.recurrent.state_pool import StatePool
from ddtree.recurrent.windows import next_tails, windows_of
from ddtree.tree_mask import expand


@dataclass(frozen=True)
class Mark:
    """Where the state after some rows of a chain is written as well, beside the state after all of them."""

    rows: int
    state: int


@dataclass(frozen=True)
class Span:
    """One sequence's rows in a step."""

    start: int
    count: int
    state: int  # its place in the pool
    depths: torch.Tensor  # [count] int64, depth of each row after the committed prefix
    sees: torch.Tensor | None  # [count, count] bool; None: each row sees those before it
    mark: Mark | None = None  # only where the rows are kept


@dataclass(frozen=True)
class RecurrentStep:
    """One step; unless it keeps its rows it is to be followed by a commit."""

    pool: StatePool
    states: torch.Tensor  # [S] int64
    starts: torch.Tensor  # [S] int64, first row of each sequence
    counts: torch.Tensor  # [S] int64
    widest: int  # N, rows of the longest sequence
    sees: torch.Tensor | None  # [S, N, N] bool, padded; a padding row sees itself; None: chains that are kept
    windows: torch.Tensor  # [n, kernel] int64 into all sequences' tails, one after another, and the rows
    places: torch.Tensor  # [n] int64 into [S * N], where each row stands in the padded batch
    marks: dict[int, Mark]  # by sequence

    @property
    def keeps(self) -> bool:
        """Whether the states move on as the rows are read; nothing is left to be committed."""
        return self.sees is None

    @classmethod
    def build(cls, pool: StatePool, spans: Sequence[Span], *, keeps: bool) -> RecurrentStep:
        """Work out the indices of a step.

        Args:
            pool: the states.
            spans: the sequences, in the order of their rows, which leave no gap.
            keeps: whether all of them are chains that are kept whole.
        """
        device = pool.matrices.device
        widest = max(span.count for span in spans)
        rows = sum(span.count for span in spans)
        assert keeps or rows <= pool.size.rows, f"{rows} rows are staged, the stash holds {pool.size.rows}"
        assert not keeps or all(span.sees is None for span in spans), "only chains are kept whole"
        sees = None if keeps else _sees(spans, widest, device)
        depths = torch.zeros((len(spans), widest), dtype=torch.int64, device=device)
        for index, span in enumerate(spans):
            depths[index, : span.count] = span.depths
        starts = torch.tensor([span.start for span in spans], device=device)
        places = [index * widest + row for index, span in enumerate(spans) for row in range(span.count)]
        stands = torch.tensor(places, device=device)
        return cls(
            pool,
            torch.tensor([span.state for span in spans], device=device),
            starts,
            torch.tensor([span.count for span in spans], device=device),
            widest,
            sees,
            windows_of(depths, sees, starts, pool.shape.kernel).flatten(0, 1)[stands],
            stands,
            {index: span.mark for index, span in enumerate(spans) if span.mark is not None},
        )

    @classmethod
    def of_rows(
        cls,
        pool: StatePool,
        rows: DeviceRows,
        states: torch.Tensor,  # [S] int64, of empty places any
    ) -> RecurrentStep:
        """Work out the indices of a step that is staged, without a look at the host.

        Row t of place s is row `s * T + t`. Padding rows see the root and themselves: they give finite values
        and are seen by none.
        """
        places, widest = rows.places, rows.rows
        count, device = places * widest, states.device
        assert count <= pool.size.rows, f"{count} rows are staged, the stash holds {pool.size.rows}"
        starts = torch.arange(places, device=device) * widest
        if pool.kernels is not None:
            sees, windows = pool.kernels.sight(rows.bits, rows.depths, pool.shape.kernel)
        else:
            sees = expand(rows.bits)
            windows = windows_of(rows.depths.long(), sees, starts, pool.shape.kernel).flatten(0, 1)
        stands = torch.arange(count, device=device)
        return cls(pool, states, starts, rows.counts.long(), widest, sees, windows, stands, {})

    def first(self, count: int) -> RecurrentStep:
        """What is to be committed of the first sequences only; the others are left as they are."""
        return replace(self, states=self.states[:count], starts=self.starts[:count])

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,  # [n, channels]
        weight: torch.Tensor,  # [channels, kernel]
    ) -> torch.Tensor:
        """Convolve along each row's path, `[n, channels]` float32; what a commit needs is noted."""
        place = self.pool.place(layer)
        if self.pool.kernels is not None:
            all_tails = self.pool.tails[place]
            output = self.pool.kernels.convolve(inputs, all_tails, weight, self.windows, self.states)
        else:
            sources = torch.cat((self.pool.tails[place, self.states].flatten(0, 1), inputs))
            output = torch.zeros(inputs.shape, dtype=torch.float32, device=inputs.device)
            for position in range(self.windows.shape[1]):
                output.addcmul_(sources[self.windows[:, position]].float(), weight[:, position].float())
        if self.keeps:
            rows, tails = self._chain_rows(), self.pool.tails[place, self.states]
            for sequence, mark in self.marks.items():
                own = slice(sequence, sequence + 1)
                count = self.counts.new_tensor([mark.rows])
                self.pool.tails[place, mark.state] = next_tails(tails[own], inputs, rows[own], count)[0]
            self.pool.tails[place, self.states] = next_tails(tails, inputs, rows, self.counts)
        else:
            self.pool.stash.inputs[place, : len(inputs)] = inputs
        return output

    def mix(self, layer: int, rows: LayerRows) -> torch.Tensor:
        """Run the recurrence along each row's path, `[n, Hv, dv]` float32."""
        place = self.pool.place(layer)
        if self.pool.kernels is not None and self.sees is not None:
            return self._mix_by_kernel(place, rows, self.sees)
        matrices = self.pool.matrices[place, self.states]
        padded = Rows(
            self._pad_rows(rows.queries),
            self._pad_rows(rows.keys),
            self._pad_rows(rows.values.float()),
            self._pad_rows(rows.log_decays.unsqueeze(-1)).squeeze(-1),
            self._pad_rows(rows.betas.float().unsqueeze(-1)).squeeze(-1),
        )
        if self.sees is None:
            stops = [Stop(sequence, mark.rows) for sequence, mark in self.marks.items()]
            read = read_chain(padded, matrices, stops=stops)
            for mark, state in zip(self.marks.values(), read.stopped, strict=True):
                self.pool.matrices[place, mark.state] = state
            self.pool.matrices[place, self.states] = read.states
            return self._flat(read.outputs)
        staged, stash = stage_tree(padded, matrices, self.sees), self.pool.stash.layer(place)
        count = len(rows.keys)
        stash.keys[:count] = rows.keys
        stash.updates[:count] = self._flat(staged.updates)
        stash.decays[:count] = self._flat(staged.decays.unsqueeze(-1)).squeeze(-1)
        return self._flat(staged.outputs)

    def _mix_by_kernel(self, place: int, rows: LayerRows, sees: torch.Tensor) -> torch.Tensor:
        kernels, stash, count = self.pool.kernels, self.pool.stash.layer(place), len(rows.keys)
        assert kernels is not None
        log_decays = self._pad_rows(rows.log_decays.unsqueeze(-1)).squeeze(-1)
        stash.keys[:count] = rows.keys
        stash.decays[:count] = self._flat(path_decays(log_decays, sees).unsqueeze(-1)).squeeze(-1)
        return kernels.stage(
            rows.queries.contiguous(), stash.keys, rows.values.contiguous(), rows.betas.contiguous(),
            stash.decays, sees, self.pool.matrices[place], self.states, self.starts, self.counts,
            stash.updates, self._room,
        )  # fmt: skip

    def run_fused(self, layer: int, inputs: LayerInputs, weights: LayerWeights) -> torch.Tensor:
        """Convolve, run the recurrence and gate, in few launches; gives `[n, Hv, dv]` in the gates' dtype.

        For steps that are staged, where there are kernels.
        """
        place, kernels = self.pool.place(layer), self.pool.kernels
        assert kernels is not None, "there are no kernels here"
        assert self.sees is not None, "what is kept is read without kernels"
        stash = self.pool.stash.layer(place)
        rows = kernels.open_rows(
            inputs, weights, self.pool.tails[place], self.windows, self.states, self.sees, self.starts,
            self.counts, stash,
        )  # fmt: skip
        outputs = kernels.stage(
            rows.queries, stash.keys, rows.values, rows.shares, stash.decays, self.sees,
            self.pool.matrices[place], self.states, self.starts, self.counts, stash.updates, self._room,
        )  # fmt: skip
        return kernels.gate(outputs, inputs.gates, weights.norm, weights.eps)

    def commit(
        self,
        paths: torch.Tensor,  # [S, J] int, nodes of each path, root first; what lies beyond it is not read
        lengths: torch.Tensor,  # [S] int, nodes of each path, 0..J; 0 where a place is empty
    ) -> None:
        """Move every state along its path. The other nodes leave no trace."""
        assert not self.keeps, "what was read is committed already"
        is_path = torch.arange(paths.shape[1], device=paths.device) < lengths[:, None]
        rows = self.starts[:, None] + paths.masked_fill(~is_path, 0)
        lengths = lengths.long()
        if self.pool.kernels is not None:
            self._commit_by_kernel(rows, lengths)
        else:
            self._commit_by_layer(rows, lengths)

    def _commit_by_layer(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        # A sequence that commits nothing may share its state with one that does. It then does what the first
        # one that commits does, so that whoever writes last writes the same.
        own = torch.arange(len(lengths), device=lengths.device)
        own = torch.where(lengths > 0, own, (lengths > 0).int().argmax())
        states, rows, lengths = self.states[own], rows[own], lengths[own]
        # One layer at a time: a copy of all layers' states at once would be as large as the states.
        for place in range(len(self.pool.shape.layers)):
            stash = self.pool.stash.layer(place)
            self.pool.matrices[place, states] = commit_path(
                self.pool.matrices[place, states],
                stash.keys[rows].transpose(1, 2),
                stash.updates[rows].transpose(1, 2),
                stash.decays[rows].transpose(1, 2),
                lengths,
            )
            tails = self.pool.tails[place, states]
            self.pool.tails[place, states] = next_tails(tails, stash.inputs, rows, lengths)

    def _commit_by_kernel(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        pool, kernels = self.pool, self.pool.kernels
        assert kernels is not None
        stash = pool.stash
        kernels.commit(pool.matrices, stash.keys, stash.updates, stash.decays, self.states, rows, lengths)
        kernels.move_tails(pool.tails, stash.inputs, self.states, rows, lengths)

    @property
    def _room(self) -> int:
        """Rows of every sequence where they are padded; 0 where they stand without a gap."""
        return self.widest if len(self.places) == len(self.states) * self.widest else 0

    def _chain_rows(self) -> torch.Tensor:
        """Rows `[S, N]` of chains; beyond their ends any."""
        rows = self.starts[:, None] + torch.arange(self.widest, device=self.starts.device)
        return rows.clamp(max=len(self.places) - 1)

    def _pad_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """`[n, heads, d]` to `[S, heads, N, d]`, zeros where there is no row."""
        batch, size = rows, len(self.states) * self.widest
        if len(rows) != size:
            batch = rows.new_zeros((size, *rows.shape[1:])).index_copy_(0, self.places, rows)
        return batch.view(len(self.states), self.widest, *rows.shape[1:]).transpose(1, 2)

    def _flat(self, batch: torch.Tensor) -> torch.Tensor:
        """Undo `_pad_rows`."""
        rows = batch.transpose(1, 2).flatten(0, 1)
        return rows if len(rows) == len(self.places) else rows[self.places]


def _sees(spans: Sequence[Span], widest: int, device: torch.device) -> torch.Tensor:
    """Who sees whom, `[S, N, N]`; padding sees itself."""
    sees = torch.eye(widest, dtype=torch.bool, device=device).repeat(len(spans), 1, 1)
    chain = torch.ones_like(sees[0]).tril()
    for index, span in enumerate(spans):
        own = chain[: span.count, : span.count] if span.sees is None else span.sees
        sees[index, : span.count, : span.count] = own
    return sees
