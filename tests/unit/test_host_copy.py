"""A copy on the host has the values of the time at which it was asked for."""

from __future__ import annotations

import torch

from titanlite.host_copy import HostCopy


def test_later_writes_to_the_tensor_do_not_change_the_copy() -> None:
    tensor = torch.arange(3.0)
    copy = HostCopy(tensor)
    tensor.fill_(7.0)
    assert copy.result().tolist() == [0.0, 1.0, 2.0]
