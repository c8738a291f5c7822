"""timm's model contract for all families: a removable head, features of every stage, gradient checkpointing.

    forward = head(pool(forward_features(images)))

A family builds its blocks and defines how images become features. `Pyramid` is the base of families with stages.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from softless.errors import ArgumentError, UnsupportedError, check_choice, shown
from softless.mechanisms import Mechanism, resolve
from softless.mechanisms.scored import check_count
from softless.models.blocks import BlockConfig, Checked, Stage
from softless.models.table import Config
from softless.nn.checks import check_rate
from softless.nn.maps import AttentionMap, attention_maps

FORMATS = ("NCHW", "NHWC")


class Backbone(nn.Module):
    """The base of all models: timm's contract around the blocks of a family. Build one with `softless.create_model`."""

    pools: tuple[str, ...] = ("avg", "")
    has_positions = False  # whether the model has a table of positions
    pretrained_cfg: dict[str, Any]  # how images are prepared, as timm reads it

    def __init__(
        self,
        config: Config,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        position_std: float | None = None,
        weight_std: float | None = None,
    ):
        super().__init__()
        if position_std is not None and not self.has_positions:
            raise ArgumentError(
                f"position_std {shown(position_std)} would change nothing: {type(self).__name__} has no positions"
            )
        self.position_std = deviation("position_std", position_std)
        self.weight_std = deviation("weight_std", weight_std)
        rates = {"proj_drop_rate": proj_drop_rate, "attn_drop_rate": attn_drop_rate, "drop_path_rate": drop_path_rate}
        for name, rate in {"drop_rate": drop_rate, **rates}.items():
            check_rate(name, rate)
        for name, number, least in (("num_classes", num_classes, 0), ("in_chans", in_chans, 1)):
            check_count(name, number, least, most=2**24)
        if drop_path_rate and sum(config.depths) == 1:
            raise ArgumentError(
                f"drop_path_rate {drop_path_rate} would change nothing: it grows from 0 at the first block to "
                f"this rate at the last, and there is only one block"
            )
        mixer = resolve(config.mechanism)
        if any(config.mixed):
            self._check(mixer)
        if attn_drop_rate and any(config.mixed) and mixer.family != "scored":
            raise UnsupportedError(
                f"attn_drop_rate {attn_drop_rate} needs explicit weights, and '{mixer.name}' has none"
            )
        self.config, self.num_classes, self.in_chans = config, num_classes, in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = config.dims[-1]
        self.rates = rates
        self.global_pool = self._pool(global_pool)
        self.patch = config.patch
        self.checked = Checked(in_chans, self.patch)
        self.head_drop = nn.Dropout(drop_rate)
        self.feature_info: list[dict[str, Any]] = []
        self.norm: nn.Module = nn.Identity()  # PVT has none
        self.build()
        self.head = self._classifier()
        self.apply(self._initialize)

    def build(self) -> None:
        """Build everything except the head."""
        raise NotImplementedError

    def _check(self, mechanism: Mechanism) -> None:
        """Raise if a mechanism cannot read the tokens of this family."""
        if (lack := mechanism.lacks(False)) is not None:
            raise UnsupportedError(f"pictures have no order of tokens, and mechanism '{mechanism.name}' {lack}")
        if mechanism.needs_grid and getattr(self, "num_prefix_tokens", 0) > 0:
            raise UnsupportedError(
                f"mechanism '{mechanism.name}' needs tokens that form a picture, and {type(self).__name__} has a class "
                "token beside them"
            )

    def _pool(self, name: str | None) -> str:
        if name is not None and not (isinstance(name, str) and name in self.pools):
            raise ArgumentError(f"global_pool {shown(name)} is not one of {', '.join(map(repr, self.pools))}")
        return self.pools[0] if name is None else name

    def _initialize(self, module: nn.Module) -> None:
        """Initialize as the authors do: linear weights normal, biases zero, convolutions as in PyTorch."""
        if isinstance(module, nn.Linear) and not module.weight.is_meta:
            trunc_normal_(module.weight, std=self.weight_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def _classifier(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()

    def plans(self, stage: int) -> Iterator[BlockConfig]:
        """Yield the configuration of each block of a stage."""
        c = self.config
        drop_paths = calculate_drop_path_rates(self.rates["drop_path_rate"], list(c.depths), stagewise=True)
        for index, rate in enumerate(drop_paths[stage]):
            mixed = index < c.mixed[stage]
            yield BlockConfig(
                dim=c.dims[stage],
                heads=c.heads[stage],
                mlp_ratio=c.mlp_ratios[stage],
                mechanism=c.mechanism if mixed else None,
                local=mixed and c.local,
                qk_conv=mixed and c.qk_conv,
                window=c.windows[stage] if mixed and c.windows else None,
                reach=c.reach[stage] if c.reach else None,
                odd=index % 2 == 1,
                last_stage=stage == len(c.depths) - 1,
                drop_path=rate,
                proj_drop=self.rates["proj_drop_rate"],
                attn_drop=self.rates["attn_drop_rate"],
            )

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the normalized features of the last stage."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "avg":
            x = x.mean((1, 2))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by one with another number of classes, 0 for none."""
        check_count("num_classes", num_classes, 0, most=2**24)
        like = next(self.parameters())
        self.global_pool = self.global_pool if global_pool is None else self._pool(global_pool)
        self.num_classes = num_classes
        self.head = self._classifier().to(like.device, like.dtype).train(self.training)
        self._initialize(self.head)

    def attention_maps(self, images: Tensor) -> Iterator[AttentionMap]:
        """Yield the explicit weights [B, heads, N, M] of each layer for these images, one layer at a time.

        >>> import torch, softless
        >>> model = softless.create_model("inline_deit_tiny").eval()
        >>> first = next(model.attention_maps(torch.randn(1, 3, 32, 48)))   # a class token and 2 x 3 patches
        >>> first.layer, first.weights.shape, first.local.shape
        ('blocks.0.attn', torch.Size([1, 6, 7, 7]), torch.Size([1, 6, 7, 7]))
        """
        return attention_maps(self, images)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the inputs of the blocks, and compute the rest again in the backward pass."""
        for module in self.modules():
            if isinstance(module, Stage):
                module.grad_checkpointing = enable

    def outputs(self) -> int:
        """Return the number of outputs that `forward_intermediates` can take: stages, or blocks in DeiT."""
        raise NotImplementedError

    def keep_first(self, count: int) -> None:
        """Drop all stages (blocks in DeiT) after the first `count`."""
        raise NotImplementedError

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what comes after the last of `indices`; `prune_norm` has nothing to drop in PVT."""
        take, last = feature_take_indices(self.outputs(), indices)
        self.keep_first(last + 1)
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def own_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a file under the names they have here."""
        return weights

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the authors do not decay, besides all with one dimension."""
        return set()


class Pyramid(Backbone):
    """A model with stages, each half as high and wide as the one before. Pictures are [B, h, w, C]."""

    output_fmt = "NHWC"

    def stages(self) -> list[tuple[Callable[[Tensor], Tensor], Stage]]:
        """Return two parts per stage: the embedding of what comes before it, and its blocks."""
        raise NotImplementedError

    def outputs(self) -> int:
        return len(self.stages())

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.checked(x)
        for embed, blocks in self.stages():
            x = blocks(embed(x))
        return self.norm(x)

    def describe(self, names: list[str]) -> None:
        self.feature_info = [
            {"num_chs": dim, "reduction": self.patch * 2**stage, "module": name}
            for stage, (dim, name) in enumerate(zip(self.config.dims, names, strict=True))
        ]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the picture after each stage of `indices`, and the features too unless `intermediates_only`.

        `norm` applies to the last stage only: the stages before it have no norm, and PVT has none at all.
        """
        check_choice("output_fmt", output_fmt, FORMATS)
        x, stages, pictures = self.checked(x), self.stages(), []
        take, last = feature_take_indices(len(stages), indices)
        for index, (embed, blocks) in enumerate(stages[: last + 1] if stop_early else stages):
            x = blocks(embed(x))
            if index in take:
                picture = self.norm(x) if norm and index == len(self.config.dims) - 1 else x
                pictures.append(picture.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else picture)
        return pictures if intermediates_only else (self.norm(x), pictures)


def deviation(name: str, value: float | None) -> float:
    """Return a standard deviation of initial weights; the authors' 0.02 for None."""
    if value is None:
        return 0.02
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ArgumentError(f"{name} {shown(value)} is not a deviation above 0, of at most 1")
    return value


def table(*shape: int, std: float = 0.02) -> nn.Parameter:
    """Return a table to be learned, of positions or class tokens."""
    return nn.Parameter(trunc_normal_(torch.empty(shape), std=std))
