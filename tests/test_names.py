"""Public names: what they are called, what `import *` takes, what help() and signatures show."""

from __future__ import annotations

import pytest

import speedlight as sl


def test_a_sequence_of_a_pool_was_called_sequence():
    with pytest.warns(DeprecationWarning, match=r"^speedlight\.Sequence is now speedlight\.PagedSequence\.$") as found:
        assert sl.Sequence is sl.PagedSequence
    assert found[0].filename == __file__
    assert "Sequence" not in dir(sl)
