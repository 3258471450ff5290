"""Every loss in every variant gives the sums, gradients and metrics that it always gave."""

import numpy as np
import pytest
import torch

from tests.algos.golden import VARIANTS, held, results


@pytest.fixture(scope="module")
def golden():
    return held()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_it_is_what_it_was(name, dtype, tolerance, golden):
    arrays, numbers = golden
    expected = {key.removeprefix(f"{name}: "): x for key, x in numbers.items() if key.startswith(f"{name}: ")}
    found = {key: x.reshape(-1) for key, x in results(name, arrays, dtype)}
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        scale = max(1.0, np.abs(x).max())
        np.testing.assert_allclose(found[key], x, rtol=0, atol=tolerance * scale, err_msg=key)
