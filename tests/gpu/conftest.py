import pytest

from moelora._load import cuda_unavailable_reason


@pytest.fixture(scope="session")
def device():
    reason = cuda_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return "cuda"
