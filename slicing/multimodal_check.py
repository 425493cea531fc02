"""Proves on a miniature that pictures and recordings can be merged at home: the blocks, given the merged embeddings
and positions and nothing else, make bit for bit what the uncut model makes, also of the tokens drawn after.

Knows nothing of processors: it is shown what one made of a sample prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from slicing.block_slice import as_position_ids
from slicing.ends import learn_ends
from slicing.forward_form import ForwardForm
from slicing.merging import Merged, Merger, tensor_pattern
from slicing.miniature import MAX_PARAMETERS, NOISE, SEED, _quiet, config_digest
from slicing.shrink import TOKEN_ID_SUFFIXES, WINDOW_KEYS, num_layers_of_one_period, small_configs
from slicing.stacks import (
    BUILDING,
    BlockStack,
    CannotCut,
    block_kinds,
    build_weightless,
    find_stack,
    first_line,
    new_model,
    persistent_names,
)

NUM_DRAWN = 4
SMALL_ENCODERS = {"depth": 2, "embed_dim": 64}  # as in `shrink.SMALL`, for encoders alone

Inputs = Mapping[str, torch.Tensor]


def check_multimodal(config: PretrainedConfig, sample: Inputs) -> frozenset[str]:
    """Check models of this configuration with what their processor made of a sample; remembered per kind of sample.

    Returns the patterns (`tensor_pattern`) of the tensors that are used before the first block. Raises `CannotCut`,
    which says what else the blocks need.
    """
    key = config_digest(config) + hashlib.sha256(repr(sorted(sample)).encode()).digest()
    with _LOCK:
        found = _FOUND.get(key)
        if found is None:
            found = _FOUND[key] = _check(config, sample)
    if isinstance(found, CannotCut):
        raise CannotCut(*found.args)
    return found


def _check(config: PretrainedConfig, sample: Inputs) -> frozenset[str] | CannotCut:
    try:
        with _quiet(), torch.no_grad():
            model, inputs = _miniature(config, sample)
            return _check_merged_against_whole(model, inputs)
    except CannotCut as error:
        return error
    except Exception as error:
        return CannotCut(f"a miniature of it does not run: {type(error).__name__}: {first_line(error)}")


def _check_merged_against_whole(model: PreTrainedModel, inputs: Inputs) -> frozenset[str]:
    stack = find_stack(model)
    names = learn_ends(model, stack, lambda: model(**inputs, use_cache=False)).opening
    with _last_states(stack) as expected:
        generate: Any = model.generate
        drawn = generate(**inputs, max_new_tokens=NUM_DRAWN, do_sample=False)[0, -NUM_DRAWN:]
    if not all(bool(states.isfinite().all()) for states in expected):
        raise CannotCut("a miniature of it makes no finite numbers")
    merged = Merger(model, stack).merge(inputs)
    with _last_states(stack) as made:
        _run_merged(model, merged, drawn[:-1].tolist())
    if len(made) != len(expected) or not torch.equal(made[0], expected[0]):
        why = "a mask of its own" if merged.own_mask else "something else"
        raise CannotCut(
            f"its blocks take {why} beside embeddings and positions where something is seen or heard"
        )
    if not all(map(torch.equal, made, expected)):
        raise CannotCut(
            "the tokens after what is seen or heard stand at positions that do not follow from it"
        )
    return frozenset(map(tensor_pattern, names))


def _run_merged(model: PreTrainedModel, merged: Merged, drawn: list[int]) -> None:
    """Run the prompt and the tokens after it as slices do: embeddings or ids, positions, and a cache."""
    form = ForwardForm.of(model)
    assert form.cache_argument is not None
    rows = len(merged.embeds)
    places = torch.arange(rows).unsqueeze(0) if merged.places is None else merged.places
    state: dict[str, Any] = {form.cache_argument: DynamicCache(config=model.config), "use_cache": True}
    model(inputs_embeds=merged.embeds.unsqueeze(0), position_ids=as_position_ids(places), **state)
    for number, token_id in enumerate(drawn):
        place = torch.full((len(places), 1), merged.next_place + number)
        model(input_ids=torch.tensor([[token_id]]), position_ids=as_position_ids(place), **state)


@contextmanager
def _last_states(stack: BlockStack) -> Iterator[list[torch.Tensor]]:
    """Collect what the last block returns, call by call."""
    seen: list[torch.Tensor] = []

    def collect(_block: Any, _args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).clone())

    hook = stack.blocks[-1].register_forward_hook(collect)
    try:
        yield seen
    finally:
        hook.remove()


def _miniature(config: PretrainedConfig, sample: Inputs) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Build the smallest model of this class that runs on the sample, and the sample in its own vocabulary."""
    reasons: list[str] = []
    kinds = block_kinds(find_stack(build_weightless(config, torch.float32)))
    for make_config in small_configs(config, num_layers_of_one_period(list(kinds))):
        try:
            small = _with_own_ids(_with_small_encoders(make_config(), config), config)
            size = sum(p.numel() for p in build_weightless(small, torch.float32).parameters())
            if size > MAX_PARAMETERS:
                raise CannotCut(f"it would have {size} parameters")
            inputs = dict(sample) | {"input_ids": _in_vocabulary(sample["input_ids"], config, small)}
            model = _with_random_weights(small)
            model(**inputs, use_cache=False)
        except CannotCut as error:
            reasons.append(str(error))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
        else:
            return model, inputs
    raise CannotCut(f"no miniature that sees or hears could be built: {'; '.join(dict.fromkeys(reasons))}")


def _with_random_weights(config: PretrainedConfig) -> PreTrainedModel:
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = new_model(config, torch.float32).eval().requires_grad_(False)
        stored = persistent_names(model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in stored and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * NOISE)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model


def _with_small_encoders(small: PretrainedConfig, config: PretrainedConfig) -> PretrainedConfig:
    """Mend the parts before the text model: what is as wide as the text model stays so, windows stay as they are."""
    text, small_text = config.get_text_config(decoder=True), small.get_text_config(decoder=True)
    text_path = _path_to(config, text)

    def mended(settings: dict[str, Any], own: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        sizes = {
            key: mended(value, own[key], (*path, key))
            if isinstance(value, dict) and isinstance(own.get(key), dict)
            else value
            if path == text_path
            else encoder_size(key, value, own.get(key, value))
            for key, value in settings.items()
        }
        return sizes if path == text_path else sizes | _inner_width(sizes, own)

    def encoder_size(key: Any, value: Any, own: Any) -> Any:
        if not isinstance(own, int) or isinstance(own, bool):
            return value
        if own == text.hidden_size:
            return small_text.hidden_size
        if key in SMALL_ENCODERS:
            return min(own, SMALL_ENCODERS[key])
        return own if key in WINDOW_KEYS else value

    return type(config).from_dict(mended(small.to_dict(), config.to_dict(), ()))


def _inner_width(sizes: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, int]:
    """Keep the inner width of an encoder's blocks the multiple of their width that it was."""
    width, inner, small = own.get("hidden_size"), own.get("intermediate_size"), sizes.get("hidden_size")
    if isinstance(width, int) and isinstance(inner, int) and isinstance(small, int) and inner % width == 0:
        return {"intermediate_size": inner // width * small}
    return {}


def _path_to(config: PretrainedConfig, part: PretrainedConfig) -> tuple[str, ...] | None:
    """Say under which names a configuration holds a part of itself."""
    if config is part:
        return ()
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig) and (path := _path_to(value, part)) is not None:
            return (name, *path)
    return None


def _with_own_ids(small: PretrainedConfig, config: PretrainedConfig) -> PretrainedConfig:
    """Give every special token of `config` an id of its own in the miniature: shrinking makes them one."""
    new_ids = _special_ids(config)

    def renamed(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        return {
            key: renamed(value, own[key])
            if isinstance(value, dict) and isinstance(own.get(key), dict)
            else _mapped(own[key], new_ids)
            if str(key).endswith(TOKEN_ID_SUFFIXES) and key in own
            else value
            for key, value in settings.items()
        }

    return type(small).from_dict(renamed(small.to_dict(), config.to_dict()))


def _mapped(value: Any, new_ids: Mapping[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return [_mapped(item, new_ids) for item in value]
    return new_ids.get(value, value) if isinstance(value, int) else value


def _special_ids(config: PretrainedConfig) -> dict[int, int]:
    """Number the special tokens that a configuration names."""
    found: set[int] = set()

    def collect(settings: Mapping[str, Any]) -> None:
        for key, value in settings.items():
            if isinstance(value, dict):
                collect(value)
            elif str(key).endswith(TOKEN_ID_SUFFIXES):
                items = value if isinstance(value, list | tuple) else [value]
                found.update(item for item in items if isinstance(item, int) and item >= 0)

    collect(config.to_dict())
    return {token_id: number for number, token_id in enumerate(sorted(found))}


def _in_vocabulary(
    input_ids: torch.Tensor, config: PretrainedConfig, small: PretrainedConfig
) -> torch.Tensor:
    """Rename the ids of a prompt: special ones as `_with_own_ids` does, all others to something behind them."""
    new_ids, size = _special_ids(config), small.get_text_config(decoder=True).vocab_size
    room = size - len(new_ids)
    if room < 1:
        raise CannotCut(f"its {len(new_ids)} special tokens do not fit a vocabulary of {size}")
    ids = [new_ids.get(one, len(new_ids) + one % room) for one in input_ids[0].tolist()]
    return torch.tensor([ids])


_LOCK = Lock()
_FOUND: dict[bytes, frozenset[str] | CannotCut] = {}
