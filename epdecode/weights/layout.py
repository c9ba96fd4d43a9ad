"""Where each model family's checkpoint keeps its MoE layer: key names, shapes and dtypes.

The names are those of the families' releases on the Hugging Face Hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epdecode.models import ModelShape

BLOCK = 128
MXFP4_GROUP = 32
"""Values that share a scale in MXFP4, two to a byte."""
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""What stands before ``layers.N.``: language models, and those inside multimodal models."""

PLAIN = ("BF16", "F16", "F32")
SCALE = ("F32", "BF16")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a tensor must be: its shape, and the dtypes (safetensors names) that can be read."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One family's names, below ``layers.N.``."""

    block: str = "mlp."
    gate: str = "gate.weight"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts."
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down matrix."""
    norm: str = "post_attention_layernorm.weight"
    ignored: tuple[str, ...] = ()
    """Tensors of the block that the layer here does not have."""
    mxfp4: bool = False
    """All experts stacked in MXFP4, the rows of gate and up by turns."""


_W123 = ("w1", "w3", "w2")
_DEEPSEEK = Layout()
_MIXTRAL = Layout(block="block_sparse_moe.", matrices=_W123)

# Keyed by config.json's architectures[0], as hf_families.FAMILIES is.
LAYOUTS: dict[str, Layout] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "KimiK2ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "Qwen3MoeForCausalLM": _DEEPSEEK,
    "Qwen2MoeForCausalLM": Layout(shared="shared_expert.", ignored=("shared_expert_gate.weight",)),
    "MixtralForCausalLM": _MIXTRAL,
    "MiniMaxForCausalLM": _MIXTRAL,
    "MiniMaxText01ForCausalLM": _MIXTRAL,
    "MiniMaxM1ForCausalLM": _MIXTRAL,
    "MiniMaxM2ForCausalLM": Layout(
        block="block_sparse_moe.", matrices=_W123, bias="e_score_correction_bias"
    ),
    "GptOssForCausalLM": Layout(
        gate="router.weight",
        ignored=("router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"),
        mxfp4=True,
    ),
}


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """The keys of one layer of one checkpoint."""

    layout: Layout
    prefix: str
    number: int

    @property
    def block(self) -> str:
        """What the keys of the MoE block begin with."""
        return f"{self.prefix}layers.{self.number}.{self.layout.block}"

    @property
    def norm(self) -> str:
        """The norm in front of the block."""
        return f"{self.prefix}layers.{self.number}.{self.layout.norm}"

    @property
    def gate(self) -> str:
        """The router's matrix."""
        return self.block + self.layout.gate

    @property
    def bias(self) -> str:
        """The router's correction of the choice."""
        return self.block + self.layout.bias

    @property
    def ignored(self) -> set[str]:
        """Keys that may be there and are not read."""
        return {self.block + name for name in self.layout.ignored}

    def matrices(self, expert: int | None) -> tuple[str, str, str]:
        """Gate, up and down of one routed expert, or (None) of the shared one."""
        owner = self.layout.shared if expert is None else f"experts.{expert}."
        gate, up, down = (f"{self.block}{owner}{name}.weight" for name in self.layout.matrices)
        return gate, up, down

    def stacked(self, matrix: str) -> tuple[str, str]:
        """Blocks and scales of all experts' ``gate_up_proj`` or ``down_proj`` in MXFP4."""
        return f"{self.block}experts.{matrix}_blocks", f"{self.block}experts.{matrix}_scales"

    def wanted(self, shape: ModelShape) -> dict[str, Wanted]:
        """Every tensor the layer must have; ``shape`` is the checkpoint's own."""
        tensors = {
            self.norm: Wanted((shape.hidden,), PLAIN),
            self.gate: Wanted((shape.num_experts, shape.hidden), PLAIN),
        }
        if shape.router.bias:
            tensors[self.bias] = Wanted((shape.num_experts,), PLAIN)
        if self.layout.mxfp4:
            return tensors | dict(self._stacked(shape))
        for expert in range(shape.num_experts):
            tensors |= self._expert(expert, shape.expert_size, shape)
        if shape.shared_size:
            tensors |= self._expert(None, shape.shared_size, shape)
        return tensors

    def _expert(self, expert: int | None, size: int, shape: ModelShape) -> dict[str, Wanted]:
        gate, up, down = self.matrices(expert)
        tensors = {}
        for key, rows, columns in (
            (gate, size, shape.hidden),
            (up, size, shape.hidden),
            (down, shape.hidden, size),
        ):
            if shape.weight_format == "bf16":
                tensors[key] = Wanted((rows, columns), PLAIN)
                continue
            tensors[key] = Wanted((rows, columns), ("F8_E4M3",))
            blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
            tensors[scale_key(key)] = Wanted(blocks, SCALE)
        return tensors

    def _stacked(self, shape: ModelShape) -> Iterator[tuple[str, Wanted]]:
        experts = shape.num_experts
        for matrix, rows, columns in (
            ("gate_up_proj", 2 * shape.expert_size, shape.hidden),
            ("down_proj", shape.hidden, shape.expert_size),
        ):
            blocks, scales = self.stacked(matrix)
            groups = columns // MXFP4_GROUP
            yield blocks, Wanted((experts, rows, groups, MXFP4_GROUP // 2), ("U8",))
            yield scales, Wanted((experts, rows, groups), ("U8",))


def scale_key(weight_key: str) -> str:
    """The key of an FP8 matrix's block scales; despite its name the scale multiplies."""
    return f"{weight_key}_scale_inv"
