from __future__ import annotations

import pytest

import pipelined.clock

virtual_loop = pytest.fixture(pipelined.clock.virtual_loop)
