"""What each model family's config.json means for its MoE layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epdecode.models import RouterShape


def shown(value: Any) -> str:
    """A JSON value in a message, cut where it is long."""
    return repr(value)[:80]


class Fields:
    """A config.json's fields; what is missing or wrong is collected, not raised.

    null counts as missing, as in the families' own code.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self.problems: list[str] = []

    def whole(
        self, key: str, default: int | None = None, least: int = 1, most: int = 1 << 24
    ) -> int:
        """An int from ``least`` to ``most``; ``least`` itself after a problem."""
        bound = f"a whole number from {least} to {most}"
        return int(self._get(key, int, default, least, lambda x: least <= x <= most, bound))

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, 1 after a problem."""
        return float(self._get(key, float, default, 1.0, lambda x: 0 < x < 1e9, "a number > 0"))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A bool, False after a problem."""
        return bool(self._get(key, bool, default, False, lambda x: True, "true or false"))

    def word(self, key: str, accepted: tuple[str, ...], default: str | None = None) -> str:
        """One of the accepted words, the first one after a problem."""
        bound = ", ".join(accepted)
        return str(self._get(key, str, default, accepted[0], lambda x: x in accepted, bound))

    def wholes(self, key: str) -> list[int]:
        """A list of ints from 0, empty when missing."""
        value = self._raw.get(key) or []
        if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
            return value
        self.problems.append(f"{key}: got {shown(value)}, accepted: a list of whole numbers")
        return []

    def refuse(self, key: str, accepted: str) -> None:
        """Note that a field's value is not one that this layer can stand for."""
        self.problems.append(f"{key}: got {shown(self._raw.get(key))}, accepted: {accepted}")

    def _get(
        self,
        key: str,
        kind: type,
        default: Any,
        fallback: Any,
        fits: Callable[[Any], bool],
        accepted: str,
    ) -> Any:
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        kinds = (int, float) if kind is float else (kind,)
        if type(value) in kinds and fits(value):
            return value
        got = "missing;" if value is None else f"got {shown(value)},"
        self.problems.append(f"{key}: {got} accepted: {accepted}")
        return fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where one family keeps the figures of its MoE layer."""

    num_experts: str
    expert_size: str
    top_k: str = "num_experts_per_tok"
    router: Callable[[Fields], RouterShape]
    shared: Callable[[Fields], int] = lambda fields: 0
    """Shared experts, in units of the routed expert's size."""
    layers: Callable[[Fields], list[int]]
    """The numbers of the MoE layers."""
    note: str = ""
    """What of the family the layer here does not reproduce."""
    mxfp4: bool = False
    """Whether MXFP4 weights are known, and held as bf16."""


def _all_layers(fields: Fields) -> list[int]:
    return list(range(fields.whole("num_hidden_layers", most=10_000)))


def _after_dense(fields: Fields) -> list[int]:
    """MoE from first_k_dense_replace on, every moe_layer_freq-th layer (DeepSeek, Kimi, GLM)."""
    first, every = fields.whole("first_k_dense_replace", least=0), fields.whole("moe_layer_freq", 1)
    return [layer for layer in _all_layers(fields) if layer >= first and layer % every == 0]


def _sparse_steps(fields: Fields) -> list[int]:
    """Every decoder_sparse_step-th layer but mlp_only_layers (Qwen)."""
    step, dense = fields.whole("decoder_sparse_step", 1), fields.wholes("mlp_only_layers")
    layers = _all_layers(fields)
    return [layer for layer in layers if (layer + 1) % step == 0 and layer not in dense]


def _shared_count(fields: Fields) -> int:
    return fields.whole("n_shared_experts", 0, least=0)


def _shared_of_size(fields: Fields) -> int:
    """Qwen2: one shared expert of its own size, a multiple of the routed experts' size."""
    size, unit = fields.whole("shared_expert_intermediate_size", least=0), "moe_intermediate_size"
    if size % fields.whole(unit):
        fields.refuse("shared_expert_intermediate_size", f"a multiple of {unit}")
    return size // fields.whole(unit)


def _no_shared(fields: Fields) -> int:
    """MiniMax: the key is there and 0 in every release; above 0 its mixing rule is another one."""
    if fields.whole("shared_intermediate_size", 0, least=0):
        fields.refuse("shared_intermediate_size", "0")
    return 0


def _deepseek_v2(fields: Fields) -> RouterShape:
    method = fields.word("topk_method", ("greedy", "group_limited_greedy"))
    fields.word("scoring_func", ("softmax",), "softmax")
    if fields.flag("norm_topk_prob", False):
        # Implementations differ on whether the scaling factor still applies then.
        fields.refuse("norm_topk_prob", "false, as in every release")
    grouped = method == "group_limited_greedy"
    return RouterShape(
        scoring="softmax",
        n_group=fields.whole("n_group") if grouped else 1,
        topk_group=fields.whole("topk_group") if grouped else 1,
        group_score="max",
        norm_topk_prob=False,
        routed_scaling_factor=fields.number("routed_scaling_factor"),
    )


def _sigmoid_with_bias(fields: Fields) -> RouterShape:
    """DeepSeek-V3, Kimi-K2 and GLM-4.5, whose files may leave out the names of their only rule."""
    fields.word("topk_method", ("noaux_tc",), "noaux_tc")
    fields.word("scoring_func", ("sigmoid",), "sigmoid")
    return RouterShape(
        scoring="sigmoid",
        bias=True,
        n_group=fields.whole("n_group"),
        topk_group=fields.whole("topk_group"),
        group_score="top2_sum",
        norm_topk_prob=fields.flag("norm_topk_prob"),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
    )


def _qwen(fields: Fields) -> RouterShape:
    return RouterShape(scoring="softmax", norm_topk_prob=fields.flag("norm_topk_prob"))


def _softmax_of_chosen(fields: Fields) -> RouterShape:
    """Softmax over the chosen logits, which is softmax, top-k and division by the sum in one."""
    return RouterShape(scoring="softmax", softmax_after_topk=True)


def _minimax_m2(fields: Fields) -> RouterShape:
    fields.word("scoring_func", ("sigmoid",))
    return RouterShape(scoring="sigmoid", bias=fields.flag("use_routing_bias"))


_DEEPSEEK_V3 = Family(
    num_experts="n_routed_experts",
    expert_size="moe_intermediate_size",
    router=_sigmoid_with_bias,
    shared=_shared_count,
    layers=_after_dense,
)
_MINIMAX = Family(
    num_experts="num_local_experts",
    expert_size="intermediate_size",
    router=_softmax_of_chosen,
    shared=_no_shared,
    layers=_all_layers,
    note="without its scaled residuals",
)

# Keyed by config.json's architectures[0].
FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        num_experts="n_routed_experts",
        expert_size="moe_intermediate_size",
        router=_deepseek_v2,
        shared=_shared_count,
        layers=_after_dense,
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _DEEPSEEK_V3,
    "KimiK2ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeForCausalLM": _DEEPSEEK_V3,
    "Qwen3MoeForCausalLM": Family(
        num_experts="num_experts",
        expert_size="moe_intermediate_size",
        router=_qwen,
        layers=_sparse_steps,
    ),
    "Qwen2MoeForCausalLM": Family(
        num_experts="num_experts",
        expert_size="moe_intermediate_size",
        router=_qwen,
        shared=_shared_of_size,
        layers=_sparse_steps,
        note="without the sigmoid gate on its shared expert",
    ),
    "MixtralForCausalLM": Family(
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        router=_softmax_of_chosen,
        layers=_all_layers,
    ),
    "MiniMaxForCausalLM": _MINIMAX,
    "MiniMaxText01ForCausalLM": _MINIMAX,
    "MiniMaxM1ForCausalLM": _MINIMAX,
    "MiniMaxM2ForCausalLM": Family(
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        router=_minimax_m2,
        shared=_no_shared,
        layers=_all_layers,
    ),
    "GptOssForCausalLM": Family(
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        router=_softmax_of_chosen,
        layers=_all_layers,
        note="shape only: SiLU for its clamped activation, no expert or router biases",
        mxfp4=True,
    ),
}
