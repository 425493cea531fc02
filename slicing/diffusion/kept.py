"""Keys and values that a session keeps of one step, for patches of the next to attend to.

An attention whose queries and keys both number all tokens is a site, and its keys and values are kept as the model made
them: after norm and rotary positions. Knows nothing of pipelines, steps or nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from slicing.diffusion.arguments import Rows
from slicing.diffusion.attention_watch import AttentionCall, Site, Watch
from slicing.errors import ModelError

HALF_TOLERANCE_STEPS = (
    4  # of a dtype's resolution: a matmul of fewer rows rounds another way in bf16 and fp16
)
TOLERANCE = (
    1e-4  # of the largest value: five orders above what float32 differs by, far below a wrong argument
)


class StaleKeys(ModelError):
    """A patch came to a session that does not hold what it needs: that pass must be made again, whole."""


class KeysDiffer(ModelError):
    """A patch does not compute what the whole pass did: it must not be used."""


class NoRoomForKeys(ModelError):
    """Keys and values need more memory than was set aside."""


def kept_bytes(
    num_tokens: int,
    width: int,
    *,
    itemsize: int,
    num_blocks: int = 1,
    batch: int = 1,
    extrapolate: bool = False,
) -> int:
    """Memory of the keys and values that one guidance branch keeps over `num_blocks` blocks.

    2·S·d elements a block: 4·S·d bytes in bf16. `width` is d, the width of a key over all heads. Extrapolation keeps
    those of two steps. The batch counts: guidance in one call keeps both rows.
    """
    return 2 * num_tokens * width * itemsize * num_blocks * batch * (2 if extrapolate else 1)


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative difference that a replay may have: 1e-4, more only where the dtype cannot resolve that."""
    return max(TOLERANCE, HALF_TOLERANCE_STEPS * torch.finfo(dtype).eps)


@dataclass(eq=False)
class KeptSite:
    """Keys and values of one site [..., heads, tokens, width], and those of the step before if they are asked for."""

    key: torch.Tensor
    value: torch.Tensor
    key_before: torch.Tensor | None = None
    value_before: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # of keys alone, as the whole pass had it: [..., 1, tokens], not counted

    @property
    def num_tokens(self) -> int:
        return self.key.shape[-2]

    @property
    def size_bytes(self) -> int:
        parts = (self.key, self.value, self.key_before, self.value_before)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def write(self, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Take newer ones, for some rows or all. Raises `KeysDiffer` if they have another shape than before."""
        for now, before, new in ((self.key, self.key_before, key), (self.value, self.value_before, value)):
            wanted = now.shape if rows is None else (*now.shape[:-2], len(rows), now.shape[-1])
            if new.shape != torch.Size(wanted) or new.dtype != now.dtype:
                raise KeysDiffer("its keys have another shape than in the step before")
            if rows is None:
                if before is not None:
                    before.copy_(now)
                now.copy_(new)
            else:
                if before is not None:
                    before.index_copy_(-2, rows, now.index_select(-2, rows))
                now.index_copy_(-2, rows, new)

    def attend(
        self, call: AttentionCall, rows: Rows, stale: torch.Tensor | None = None, extrapolate: float = 0.0
    ) -> torch.Tensor:
        """What the patch's queries give over all keys; those of `stale` tokens moved on by their last change's share.

        Raises `KeysDiffer` where attention is not the whole pass's: causal, or under another mask.
        """
        if call.is_causal:
            raise KeysDiffer("its attention is causal, which patches cannot be")
        key, value = self.key, self.value
        if (
            extrapolate
            and stale is not None
            and self.key_before is not None
            and self.value_before is not None
        ):
            key = _moved_on(key, self.key_before, stale, extrapolate)
            value = _moved_on(value, self.value_before, stale, extrapolate)
        return replace(call, key=key, value=value, attn_mask=self._mask_of(call, rows)).run()

    def _mask_of(self, call: AttentionCall, rows: Rows) -> torch.Tensor | None:
        """A mask of all queries, cut to ours. One that the block made for our keys only becomes the whole pass's."""
        mask = call.attn_mask
        if mask is None:
            return None
        if mask.shape[-1] == call.num_keys != self.num_tokens:
            ours = None if self.mask is None else self.mask.index_select(-1, rows.rows.to(mask.device))
            if ours is None or not torch.equal(ours, mask):
                raise KeysDiffer("its attention's mask is not that of the whole pass")
            return self.mask
        if mask.dim() > 1 and mask.shape[-2] == self.num_tokens != call.num_queries:
            return mask.index_select(-2, rows.rows.to(mask.device))
        return mask


def _moved_on(now: torch.Tensor, before: torch.Tensor, stale: torch.Tensor, share: float) -> torch.Tensor:
    last = now.index_select(-2, stale)
    guess = last + share * (last - before.index_select(-2, stale))
    return now.clone().index_copy_(-2, stale, guess)


class KeptKeys:
    """The kept keys and values of one session: of one guidance branch of one picture, and of nobody else.

    `record` watches a whole pass, `patch` one patch of a later step, `check` a patch that is run only to be compared.
    `lengths` are the numbers of tokens at which an attention is a site. `limit_bytes` is what was set aside; None is
    no limit. Not for two threads at once.
    """

    def __init__(
        self, lengths: frozenset[int], *, extrapolate: bool = False, limit_bytes: int | None = None
    ) -> None:
        self._lengths = lengths
        self._extrapolate = extrapolate
        self._limit_bytes = limit_bytes
        self._sites: dict[Site, KeptSite] = {}
        self._text_sites: frozenset[Site] = frozenset()
        self._fresh: list[Rows] = []

    @property
    def extrapolates(self) -> bool:
        """Whether those of the step before are kept too."""
        return self._extrapolate

    @property
    def sites(self) -> frozenset[Site]:
        """Where keys and values are held."""
        return frozenset(self._sites)

    @property
    def size_bytes(self) -> int:
        """Memory held now."""
        return sum(kept.size_bytes for kept in self._sites.values())

    def record(self) -> Recording:
        """Watch a whole pass and keep the keys and values of its sites."""
        self._fresh = []
        return Recording(self)

    def patch(self, rows: Rows, extrapolate: float = 0.0) -> Watch:
        """Watch one patch: its keys and values replace the kept ones, and its queries attend to all."""
        if not self._sites:
            raise StaleKeys("no keys and values are kept here: this pass must be whole")
        return _Patching(self, rows, extrapolate)

    def check(self, rows: Rows) -> Checking:
        """Watch a patch of the step just kept: raises `KeysDiffer` where its keys or values are others.

        Nothing kept is changed.
        """
        return Checking(self, rows)

    def begin_step(self) -> None:
        """What the patches of the step before made fresh is stale now."""
        self._fresh = []

    def finish_patch(self, rows: Rows) -> None:
        """This patch went through all blocks: for the step's later patches it is fresh."""
        self._fresh.append(rows)

    def drop_sites(self, sites: Iterable[Site]) -> None:
        """Keep nothing more for these: their keys come from text, and every patch computes them itself."""
        self._text_sites |= frozenset(sites)
        for site in self._text_sites:
            self._sites.pop(site, None)

    def close(self) -> None:
        """Let go of everything."""
        self._sites.clear()
        self._fresh = []

    def kept_at(self, site: Site) -> KeptSite | None:
        """What is kept of a site, or None where none is."""
        return self._sites.get(site)

    def is_site(self, call: AttentionCall) -> bool:
        """Whether this is attention of all tokens to all tokens."""
        return call.num_queries == call.num_keys and call.num_keys in self._lengths

    def keep(self, site: Site, call: AttentionCall) -> bool:
        """Take the keys and values of a whole pass. Whether the keys are the very ones kept before."""
        if site in self._text_sites:
            return False
        if (kept := self._sites.get(site)) is not None:
            same = torch.equal(kept.key, call.key)
            kept.write(call.key, call.value)
        else:
            same = False
            self._ask_room(self.needed_bytes(call))
            kept = self._sites[site] = KeptSite(_copy(call.key), _copy(call.value))
            if self._extrapolate:
                kept.key_before, kept.value_before = kept.key.clone(), kept.value.clone()
        mask = call.attn_mask
        is_of_keys = (
            mask is not None and mask.shape[-1] == call.num_keys and mask.numel() <= call.key[..., 0].numel()
        )
        kept.mask = mask.clone() if mask is not None and is_of_keys else None
        return same

    def stale_rows(self, rows: Rows) -> torch.Tensor:
        """Numbers of the tokens of a site whose keys are still those of the step before, while this patch runs."""
        is_stale = torch.ones(rows.total, dtype=torch.bool)
        for fresh in (*self._fresh, rows):
            is_stale[fresh.at(rows.total).rows] = False
        return is_stale.nonzero().view(-1)

    def needed_bytes(self, call: AttentionCall) -> int:
        """Memory that one site takes."""
        of_one = sum(part.numel() * part.element_size() for part in (call.key, call.value))
        return 2 * of_one if self._extrapolate else of_one

    def _ask_room(self, needed_bytes: int) -> None:
        if self._limit_bytes is not None and self.size_bytes + needed_bytes > self._limit_bytes:
            raise NoRoomForKeys(
                f"keys and values need more than the {self._limit_bytes} bytes set aside for them"
            )


class Recording(Watch):
    """Of a whole pass. Never disturbs it: where keys cannot be kept, `failure` says why and the pass goes on."""

    def __init__(self, kept: KeptKeys) -> None:
        self._kept = kept
        self.unchanged: set[Site] = set()
        self.needed_bytes = 0
        self.failure: ModelError | None = None

    def attend(self, site: Site, call: AttentionCall) -> torch.Tensor:
        if self._kept.is_site(call):
            self.needed_bytes += self._kept.needed_bytes(call)
            if self.failure is None:
                self._keep(site, call)
        return call.run()

    def why_not(self) -> str:
        """Why nothing was kept, with the numbers where it was for want of room."""
        needed = f": {self.needed_bytes} are needed" if isinstance(self.failure, NoRoomForKeys) else ""
        return f"{self.failure}{needed}"

    def _keep(self, site: Site, call: AttentionCall) -> None:
        try:
            if self._kept.keep(site, call):
                self.unchanged.add(site)
        except (KeysDiffer, NoRoomForKeys) as error:
            self.failure = error
            self._kept.close()


class _Patching(Watch):
    """Of one patch: fresh rows are written into the kept ones, and all of them attended to."""

    def __init__(self, kept: KeptKeys, rows: Rows, extrapolate: float) -> None:
        self._kept = kept
        self._rows = rows
        self._extrapolate = extrapolate

    def attend(self, site: Site, call: AttentionCall) -> torch.Tensor:
        kept = self._kept.kept_at(site)
        if kept is None:
            return call.run()
        rows = self._rows.at(kept.num_tokens)
        if not call.num_queries == call.num_keys == len(rows.rows):
            raise KeysDiffer("its attention takes another number of tokens than in the replay")
        device = call.key.device
        if rows.written is None:
            kept.write(call.key, call.value, rows.rows.to(device))
        else:
            places = rows.written.to(device)
            new = call.key.index_select(-2, places), call.value.index_select(-2, places)
            kept.write(*new, rows.rows[rows.written].to(device))
        stale = self._kept.stale_rows(rows).to(device) if self._extrapolate else None
        return kept.attend(call, rows, stale, self._extrapolate)


class Checking(Watch):
    """Of a patch of a step whose keys are kept already: they must come out the same. Changes nothing.

    Where the patch's queries meet all keys although only a patch ran, keys do not come from the picture: `text_sites`.
    """

    def __init__(self, kept: KeptKeys, rows: Rows) -> None:
        self._kept = kept
        self._rows = rows
        self.seen: set[Site] = set()
        self.text_sites: set[Site] = set()

    def attend(self, site: Site, call: AttentionCall) -> torch.Tensor:
        kept = self._kept.kept_at(site)
        if kept is None:
            return call.run()
        self.seen.add(site)
        rows = self._rows.at(kept.num_tokens)
        num_rows = len(rows.rows)
        if (call.num_queries, call.num_keys) == (num_rows, kept.num_tokens) and num_rows < kept.num_tokens:
            self.text_sites.add(site)
            return call.run()
        if not call.num_queries == call.num_keys == num_rows:
            raise KeysDiffer("its attention does not take the patch's tokens only")
        places = rows.rows.to(call.key.device)
        for new, whole in ((call.key, kept.key), (call.value, kept.value)):
            if not is_close(new, whole.index_select(-2, places)):
                raise KeysDiffer("its keys or values are not those of the whole pass")
        return kept.attend(call, rows)


def is_close(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether they differ by at most the tolerance of the largest old value; false for a NaN or another shape."""
    if new.shape != old.shape or new.dtype != old.dtype:
        return False
    return difference(new, old) <= tolerance_of(old.dtype)


def difference(new: torch.Tensor, old: torch.Tensor) -> float:
    """The largest difference, as a share of the largest old value; NaN where either is no number."""
    if not new.numel():
        return 0.0
    largest = old.float().abs().max()
    error = (new.float() - old.float()).abs().max()
    return float(error / largest) if largest > 0 else float(error)


def _copy(part: torch.Tensor) -> torch.Tensor:
    """A copy of its own: what a model hands to attention is often a view of something three times as large."""
    return part.clone(memory_format=torch.contiguous_format)
