"""Checks of values against each other that need no plan: no world size, no library limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epdecode.config import Config
from epdecode.models import ModelShape


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken rule: the key to point at, what it holds, what is accepted, keys it depends on."""

    key: str
    got: object
    accepted: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line, for configs that come from no file."""
        return f"{self.key}: got {self.got}, accepted: {self.accepted}"


def config_rules(config: Config) -> Iterator[Breach]:
    """What a config breaks. Limits of the libraries and of the world size are the plan's."""
    yield from _layer_rules(config)
    yield from _routing_rules(config)
    batch, limit = config.batch, config.transport.max_tokens_per_rank
    buckets = list(batch.buckets)
    if not buckets:
        yield Breach("batch.buckets", buckets, "at least one batch size")
        return
    if buckets != sorted(set(buckets)):
        yield Breach("batch.buckets", buckets, f"ascending, each once: {sorted(set(buckets))}")
    if max(buckets) > limit:
        accepted = f"up to transport.max_tokens_per_rank = {limit}, which sizes the buffers"
        others = ("transport.max_tokens_per_rank",)
        yield Breach("batch.buckets", max(buckets), accepted, others)
    if batch.tokens_per_rank > max(buckets):
        accepted = f"up to the largest of batch.buckets, {max(buckets)}"
        yield Breach("batch.tokens_per_rank", batch.tokens_per_rank, accepted, ("batch.buckets",))


def _layer_rules(config: Config) -> Iterator[Breach]:
    if isinstance(config.layers, tuple):
        layers = list(config.layers)
        if not layers or layers != sorted(set(layers)):
            accepted = "a count, or numbers of the model's MoE layers, ascending, each once"
            yield Breach("layers", layers, accepted)


def _routing_rules(config: Config) -> Iterator[Breach]:
    """What needs a file names one, and what names a file needs it."""
    routing, experts = config.routing, config.experts
    recorded = routing.kind in ("trace", "load_table")
    if recorded and routing.path is None:
        yield Breach("routing.path", "null", f"a file, for routing.kind {routing.kind}")
    if routing.path is not None and not recorded:
        accepted = "null, or routing.kind: trace or load_table"
        yield Breach("routing.path", routing.path, accepted, ("routing.kind",))
    if experts.placement == "contiguous" and experts.redundant:
        accepted = "0, or experts.placement: balanced"
        yield Breach("experts.redundant", experts.redundant, accepted, ("experts.placement",))
    if experts.placement == "contiguous" and experts.load is not None:
        accepted = "null, or experts.placement: balanced"
        yield Breach("experts.load", experts.load, accepted, ("experts.placement",))
    if config.weights.path is not None and config.weights.source == "seeded":
        accepted = "null, or weights.source: checkpoint"
        yield Breach("weights.path", config.weights.path, accepted, ("weights.source",))


def model_rules(model: ModelShape) -> Iterator[Breach]:
    """What a model shape breaks."""
    router, experts = model.router, model.num_experts
    layers = list(model.moe_layers)
    if layers and (layers != sorted(set(layers)) or len(layers) != model.num_moe_layers):
        accepted = f"num_moe_layers = {model.num_moe_layers} ascending numbers, or none"
        yield Breach("moe_layers", layers, accepted, ("num_moe_layers",))
    if model.top_k > experts:
        yield Breach("top_k", model.top_k, f"up to num_experts = {experts}")
    if experts % router.n_group:
        yield Breach("router.n_group", router.n_group, f"a divisor of num_experts = {experts}")
        return
    group_size = experts // router.n_group
    if router.topk_group > router.n_group:
        accepted = f"up to router.n_group = {router.n_group}"
        yield Breach("router.topk_group", router.topk_group, accepted)
    elif model.top_k > group_size * router.topk_group:
        accepted = (
            f"groups enough for top_k = {model.top_k}: {-(-model.top_k // group_size)} or more"
        )
        yield Breach("router.topk_group", router.topk_group, accepted)
    if router.n_group > 1 and router.group_score == "top2_sum" and group_size < 2:
        accepted = "max, since a group here has one expert"
        yield Breach("router.group_score", router.group_score, accepted)
    if router.softmax_after_topk and router.scoring != "softmax":
        yield Breach("router.scoring", router.scoring, "softmax when softmax_after_topk is true")
