"""Ring attention: KV blocks travel the ring while each rank attends to the block it holds.

Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889, over the hops and transfers of
plan.py and in the phases of phases.py.

Shape letters: B batch, T local tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cpmoe.attention import phases
from cpmoe.attention.blocks import KeyValueBlock, KeyValueGradient, KeyValueSizes, pack
from cpmoe.attention.phases import ReachedBlock
from cpmoe.attention.plan import AttentionPlan, RemoteHop, TokenRanges, Transfer
from cpmoe.attention.scores import Scores
from cpmoe.parallel.transport import transport


def ring_attention(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    plan: AttentionPlan,
    ring: ProcessGroup | None,
    ring_grad: ProcessGroup | None,
    backend: str = "auto",
    scores: Scores | None = None,
    dkv_dtype: str = "float32",
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks that `plan` shows them: out [B, T, H, D].

    q [B, T, H, D], k and v [B, T, G, D] with H a multiple of G, of one floating dtype, any strides, equal in
    shape on every rank; v, and with it the output, may have another head size. `plan` from `build_plan` for
    the same documents. `scores` defaults to a scale of D^-0.5. Queries that see nothing (padding) give
    exactly 0. Outputs and gradients have the dtype of their input; sums over blocks are kept in float32
    (float64 for float64), and dKV is sent in it, or where `dkv_dtype` is bfloat16 and they are float32, in
    bfloat16: half the bytes, and one more rounding at each transfer. Measured for one causal document in
    bfloat16, head size 64: relative error of dK 2.1e-3, 2.5e-3, 3.4e-3 on 2, 4, 8 ranks against 1.9e-3,
    1.8e-3, 1.8e-3 with float32 on the wire.

    Forward sends KV on `ring`. Backward sends KV again on `ring` from the second hop on (the first block
    received is kept) and dKV on `ring_grad`. Both are None where the ring has one rank. All ranks of
    the ring call it in the same order. Raises ValueError for inputs that do not fit the plan or the backend.
    """
    given = q_BTHD, k_BTGD, v_BTGD, plan, ring, ring_grad, backend, scores, dkv_dtype
    return phases.run(RingKeys, *given)


class _Exchange:
    """One transfer in flight: this rank's send and receive of `tokens`, packed (`KeyValueSizes`)."""

    def __init__(self, transfer: Transfer, sent: Tensor, group: ProcessGroup) -> None:
        size = sent.numel() // transfer.send.wire_tokens * transfer.receive.wire_tokens
        self.tokens = transfer.receive
        self._flight = transport.exchange(
            sent.new_empty(size), sent, transfer.from_rank, transfer.to_rank, group
        )

    def wait(self) -> Tensor:
        return self._flight.wait()


class RingKeys:
    """`phases.TravellingKeys` on a ring, hop by hop.

    Kept between the slices are each rank's own KV and that of the first hop (transfers.py), and their sums
    of dKV. At further hops, which only rings of three or more ranks have, the tokens of earlier slices
    travel again, together with this slice's.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        ring: ProcessGroup | None,
        ring_grad: ProcessGroup | None,
        wire: torch.dtype,
        before: RingKeys | None,
    ) -> None:
        self.plan = plan
        self._ring, self._ring_grad, self._wire, self._before = ring, ring_grad, wire, before
        self._own: KeyValueBlock | None = None
        self._first: KeyValueBlock | None = None
        self._fetching: _Exchange | None = None
        self._like: tuple[Tensor, Tensor] | None = None
        self._own_sums: KeyValueGradient | None = None
        self._first_sums: KeyValueGradient | None = None
        self._last_sums: KeyValueGradient | None = None
        self._delivering: _Exchange | None = None

    @property
    def _slices(self) -> list[RingKeys]:
        """This slice's and those before it, from the last to the first."""
        return [self, *(self._before._slices if self._before is not None else [])]

    def launch(self, own: KeyValueBlock) -> None:
        self._own, self._like = own, own.like()
        if self.plan.remote:
            self._fetching = self._fetch(self.plan.remote[0], self.own_blocks())

    def own_blocks(self) -> list[KeyValueBlock]:
        return [keys._own for keys in self._slices if keys._own is not None]

    def wait(self) -> None:
        if self._fetching is not None:
            packed, self._fetching = self._fetching.wait(), None
            self._first = self._arrived(self.plan.remote[0], packed)

    def held(self) -> tuple[Tensor, ...]:
        if not self.plan.remote:
            return ()
        firsts = [keys._first for keys in self._at_first_hop]
        held = [block.packed for block in firsts if block is not None and block.packed is not None]
        if self._sends_own:
            held += [x for block in self.own_blocks() for x in (block.k_BTGD, block.v_BTGD)]
        return tuple(held)

    def release(self) -> None:
        self._own = self._first = None

    def remote_blocks(self, held: Sequence[Tensor]) -> Iterator[tuple[RemoteHop, list[ReachedBlock]]]:
        remote = self.plan.remote
        if not remote:
            return
        firsts = self._at_first_hop
        packed, kv = held[: len(firsts)], held[len(firsts) :]
        blocks = [keys._arrived(keys.plan.remote[0], x) for keys, x in zip(firsts, packed, strict=True)]
        senders = self._slices if self._sends_own else []
        tokens = [keys.plan.own_tokens for keys in senders]
        own = list(map(KeyValueBlock, kv[::2], kv[1::2], tokens))
        for hop, following in zip_longest(remote, remote[1:]):
            fetching = None if following is None else self._fetch(following, own or blocks)
            reaches = hop.parts if hop.by_slice else (hop.reach,)
            yield hop, list(zip(blocks, reaches, strict=True))
            if fetching is not None:
                blocks = [self._arrived(following, fetching.wait())]

    def own_gradients(self) -> list[KeyValueGradient]:
        return [keys._own_gradient() for keys in self._slices]

    def remote_gradients(self, hop: RemoteHop) -> list[KeyValueGradient]:
        if hop is not self.plan.remote[0]:
            return [self._sums_of(hop.deliver.send)]
        return [keys._first_gradient() for keys in self._at_first_hop]

    def deliver(self, hop: RemoteHop, dkv: KeyValueGradient) -> None:
        self._take_delivered([dkv] if self.plan.is_relayed else self.own_gradients())
        if hop is self.plan.remote[-1]:
            self._last_sums = dkv
        else:
            self._delivering = self._send_on(hop, dkv)
        self._first_sums = None

    def launch_home(self) -> None:
        if self._last_sums is not None:
            self._delivering = self._send_on(self.plan.remote[-1], self._last_sums)
            self._last_sums = None

    def collect(self) -> tuple[Tensor, Tensor]:
        sums = self.own_gradients()
        self._take_delivered(sums)
        self._own_sums = None
        return sums[0].result()

    @property
    def _at_first_hop(self) -> list[RingKeys]:
        """Those whose tokens this slice's queries attend to at the first hop."""
        return self._slices if self.plan.remote[0].by_slice else [self]

    @property
    def _sends_own(self) -> bool:
        """Whether hops after the first fetch from the rank whose KV it is."""
        return len(self.plan.remote) > 1 and not self.plan.is_relayed

    def _fetch(self, hop: RemoteHop, blocks: Sequence[KeyValueBlock]) -> _Exchange:
        assert self._ring is not None
        return _Exchange(hop.fetch, pack(blocks, hop.fetch.send), self._ring)

    def _arrived(self, hop: RemoteHop, packed: Tensor) -> KeyValueBlock:
        assert self._like is not None
        return KeyValueBlock.from_packed(packed, KeyValueSizes.of(*self._like), hop.fetch.receive)

    def _send_on(self, hop: RemoteHop, dkv: KeyValueGradient) -> _Exchange:
        assert self._ring_grad is not None
        return _Exchange(hop.deliver, dkv.packed().to(self._wire), self._ring_grad)

    def _take_delivered(self, sums: Sequence[KeyValueGradient]) -> None:
        """Waits for the dKV that comes here, if any, and adds each token's where it belongs."""
        if self._delivering is not None:
            packed = self._delivering.wait()
            for dkv in sums:
                dkv.add_packed(self._delivering.tokens, packed)
            self._delivering = None

    def _sums_of(self, tokens: TokenRanges) -> KeyValueGradient:
        assert self._like is not None
        return KeyValueGradient(tokens, *self._like)

    def _own_gradient(self) -> KeyValueGradient:
        if self._own_sums is None:
            self._own_sums = self._sums_of(self.plan.own_tokens)
        return self._own_sums

    def _first_gradient(self) -> KeyValueGradient:
        if self._first_sums is None:
            self._first_sums = self._sums_of(self.plan.remote[0].deliver.send)
        return self._first_sums
