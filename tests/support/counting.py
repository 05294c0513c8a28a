"""What sdpa() and patch() take and leave, as tests count it: from nothing, in each of them."""

from __future__ import annotations

import pytest

import speedlight as sl
import speedlight.torch
from speedlight.torch import report

SDPA, FLASH = "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(autouse=True)
def counted():
    report(reset=True)
    yield
    assert not sl.torch.routing.ours(), "a test left its thread asking for speedlight"
