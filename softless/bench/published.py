"""Sizes of the models, counted, beside those that their paper prints (Han et al. 2024, tables 5, 6 and 11).

Three counts differ from the paper and agree with the authors' code: the parameters of InLine-PVT-L and InLine-Swin-T,
and the multiply-adds of InLine-Swin-B at 384. For InLine-DeiT-S the paper prints 224 pixels; its code and its counts
say 288. This module needs no timm, so that `softless list --models` works without it.
"""

from typing import NamedTuple


class Facts(NamedTuple):
    """Counts of one model at its own image size. The paper counts in millions, and in billions that it calls FLOPs."""

    parameters: int
    macs: int
    paper_parameters: float
    paper_macs: float
    paper_top1: float  # ImageNet-1K, percent

    @property
    def paper(self) -> dict[str, float]:
        """What the paper prints: accuracy in percent, parameters, multiply-adds."""
        counts = {"parameters": round(self.paper_parameters * 1e6), "macs": round(self.paper_macs * 1e9)}
        return {"top1": self.paper_top1, **counts}


FACTS = {
    "inline_deit_tiny": Facts(6_477_736, 1_108_701_696, 6.5, 1.1, 74.5),
    "inline_deit_small": Facts(16_734_760, 4_964_564_480, 16.7, 5.0, 80.2),
    "inline_deit_base": Facts(23_797_096, 17_165_515_776, 23.8, 17.2, 82.3),
    "inline_pvt_tiny": Facts(12_032_232, 1_975_066_112, 12.0, 2.0, 78.2),
    "inline_pvt_small": Facts(21_556_136, 3_913_413_632, 21.6, 3.9, 82.0),
    "inline_pvt_medium": Facts(37_618_856, 6_859_722_752, 37.6, 6.9, 83.2),
    "inline_pvt_large": Facts(51_154_280, 10_126_525_696, 50.2, 10.2, 83.6),
    "inline_swin_tiny": Facts(29_223_544, 4_457_619_456, 30.0, 4.5, 82.4),
    "inline_swin_small": Facts(49_793_296, 8_718_480_384, 50.0, 8.7, 83.6),
    "inline_swin_base": Facts(88_350_120, 15_396_397_056, 88.0, 15.4, 84.1),
    "inline_swin_base_384": Facts(88_465_320, 46_196_023_296, 88.0, 45.2, 85.0),
    "inline_cswin_tiny": Facts(20_604_520, 4_310_810_112, 21.0, 4.3, 83.2),
    "inline_cswin_small": Facts(33_032_872, 6_771_769_344, 33.0, 6.8, 83.8),
    "inline_cswin_base": Facts(73_413_640, 14_882_913_792, 73.0, 14.9, 84.5),
    "inline_cswin_base_384": Facts(73_413_640, 46_214_856_192, 73.0, 46.3, 85.7),
    "deit_tiny": Facts(5_717_416, 1_253_683_200, 5.7, 1.2, 72.2),
    "deit_small": Facts(22_050_664, 4_598_882_304, 22.1, 4.6, 79.8),
    "deit_base": Facts(86_567_656, 17_563_828_224, 86.6, 17.6, 81.8),
    "pvt_tiny": Facts(13_227_240, 1_926_417_408, 13.2, 1.9, 75.1),
    "pvt_small": Facts(24_483_816, 3_805_960_192, 24.5, 3.8, 79.8),
    "pvt_medium": Facts(44_206_056, 6_649_434_112, 44.2, 6.7, 81.2),
    "pvt_large": Facts(61_367_272, 9_804_024_320, 61.4, 9.8, 81.7),
    "swin_tiny": Facts(28_288_354, 4_490_566_656, 29.0, 4.5, 81.3),
    "swin_small": Facts(49_606_258, 8_740_875_264, 50.0, 8.7, 83.0),
    "swin_base": Facts(87_768_224, 15_430_946_816, 88.0, 15.4, 83.5),
    "swin_base_384": Facts(87_903_584, 47_083_134_976, 88.0, 47.0, 84.5),
    "cswin_tiny": Facts(22_320_552, 4_324_203_008, 23.0, 4.3, 82.7),
    "cswin_small": Facts(34_643_304, 6_800_714_752, 35.0, 6.9, 83.6),
    "cswin_base": Facts(77_382_184, 14_955_348_480, 78.0, 15.0, 84.2),
    "cswin_base_384": Facts(77_382_184, 46_963_660_800, 78.0, 47.0, 85.4),
}
