"""timm's own tests of its models pass on our smallest; `make timm-conformance` runs them on all."""

import pytest

from tests.conformance.run import SDIST, main


@pytest.mark.skipif(not SDIST.exists(), reason=f"there is no {SDIST}: make timm-conformance downloads it")
def test_timms_own_tests_pass_on_our_smallest_model(capfd):
    failed = main(["-q", "-k", "inline_deit_tiny"])
    assert not failed, capfd.readouterr().out
