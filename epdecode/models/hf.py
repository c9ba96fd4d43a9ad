"""A Hugging Face config.json -> ModelShape. Only that file is read; no model code is ever run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from epdecode.config.reader import read_text
from epdecode.config.rules import model_rules
from epdecode.errors import ConfigError, nearest
from epdecode.models import ModelShape
from epdecode.models.hf_families import FAMILIES, Family, Fields, shown

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether ``name`` may be an organisation's model on the Hub (``org/name``)."""
    is_file = name.endswith((".yaml", ".yml", ".json"))
    return bool(_HUB_NAME.fullmatch(name)) and not is_file


def cached_config(name: str, looked: str) -> Path:
    """config.json of a Hub model in the local cache; nothing is fetched, nodes may be offline.

    ConfigError gives the exact path that is missing and how to fill it; ``looked`` says where
    else the model was looked for.
    """
    try:
        from huggingface_hub import constants, try_to_load_from_cache
    except ImportError as error:
        raise ConfigError(
            f"model: {name!r} on the Hub needs huggingface_hub, which is not installed: "
            "pip install 'epdecode[hub]', or give the path of a folder with its config.json"
        ) from error
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError as error:
        raise ConfigError(f"model: {name!r} is no name of a Hub model: {error}") from error
    if isinstance(found, str):
        return Path(found)
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    raise ConfigError(
        f"model: got {name!r}, not in the local Hub cache: no {folder}/snapshots/*/config.json "
        f"({looked}). `hf download {name} config.json` fetches it; HF_HUB_CACHE names another cache"
    )


def load_hf(path: Path) -> ModelShape:
    """The shape of a config.json, or one ConfigError with everything that is missing or unknown."""
    raw = _text_config(_read(path))
    family = FAMILIES[_architecture(raw, path)]
    fields = Fields(raw)
    layers = family.layers(fields)
    fields.word("hidden_act", ("silu",), "silu")
    if not (layers or fields.problems):
        fields.problems.append("no layer of this model is an MoE layer")
    shape = ModelShape(
        name=_model_name(path),
        source=f"{path} ({family.note})" if family.note else str(path),
        hidden=fields.whole("hidden_size"),
        expert_size=fields.whole(family.expert_size),
        num_experts=fields.whole(family.num_experts),
        top_k=fields.whole(family.top_k),
        num_shared_experts=family.shared(fields),
        num_moe_layers=len(layers),
        moe_layers=tuple(layers),
        weight_format=_weight_format(raw, fields, family),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        router=family.router(fields),
    )
    problems = list(dict.fromkeys(fields.problems)) or [
        f"{breach.key}: got {breach.got}, accepted: {breach.accepted}"
        for breach in model_rules(shape)
    ]
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return shape


def read_architecture(path: Path) -> str:
    """The model's class in a config.json, a key of hf_families.FAMILIES."""
    return _architecture(_text_config(_read(path)), path)


def _model_name(path: Path) -> str:
    """The folder's name; in the Hub cache (models--org--name/snapshots/revision) the model's."""
    folder = path.absolute().parent
    if folder.parent.name == "snapshots":
        folder = folder.parent.parent
    return folder.name.rpartition("--")[2] or "model"


def _read(path: Path) -> dict[str, Any]:
    """The file's JSON object."""
    text = read_text(path)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{path}{line}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: got {type(raw).__name__}, accepted: a JSON object")
    return raw


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config, with the quantisation of the whole."""
    inner = raw.get("text_config")
    if not isinstance(inner, dict) or "architectures" not in inner:
        return raw
    return {"quantization_config": raw.get("quantization_config")} | inner


def _architecture(raw: dict[str, Any], path: Path) -> str:
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if isinstance(first, str) and first in FAMILIES:
        return first
    got = "missing" if names is None else f"got {shown(names)}"
    accepted = f"accepted: {', '.join(FAMILIES)}{nearest(str(first), FAMILIES)}"
    raise ConfigError(f"{path}: architectures: {got}, {accepted}")


def _weight_format(
    raw: dict[str, Any], fields: Fields, family: Family
) -> Literal["fp8_block128", "bf16"]:
    """bf16 unless the file says FP8 in blocks of 128x128, the one quantisation taken over."""
    quant = raw.get("quantization_config")
    if quant is None:
        return "bf16"
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    if method == "mxfp4" and family.mxfp4:
        return "bf16"
    accepted = "none, or fp8 with weight_block_size [128, 128]"
    if method != "fp8" or not isinstance(quant, dict):
        fields.problems.append(
            f"quantization_config.quant_method: got {shown(method)}, accepted: {accepted}"
        )
        return "bf16"
    block = quant.get("weight_block_size")
    if block != [128, 128]:
        fields.problems.append(
            f"quantization_config.weight_block_size: got {shown(block)}, accepted: {accepted}"
        )
    return "fp8_block128"
