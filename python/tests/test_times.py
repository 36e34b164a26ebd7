"""Time limits of every size: none raises anything but `Timeout`, and what came in time is there."""

import threading

import pytest

import millpond
from conftest import eventually

HUGE = [1e10, 1e300, float("inf"), 10**400]


@pytest.mark.parametrize("timeout", HUGE, ids=range(len(HUGE)))
def test_a_huge_limit_is_none(pair, timeout):
    a, b = pair
    got = []
    readers = [threading.Thread(target=lambda: got.append(b.recv(timeout=timeout))) for _ in range(3)]
    for reader in readers:
        reader.start()
    eventually(lambda: b._waiting == 2)
    for n in range(4):
        a.send(n, timeout=timeout)
    assert b.recv(timeout=timeout) in range(4)
    for reader in readers:
        reader.join(10)
    assert len(got) == 3


@pytest.mark.parametrize("timeout", [0, -1, -0.5, -1e300, float("-inf")])
def test_no_time_or_less_is_one_try(pair, timeout):
    a, b = pair
    a.send(1, timeout=timeout)
    assert b.recv(timeout=timeout) == 1
    with pytest.raises(millpond.Timeout):
        b.recv(timeout=timeout)
    with pytest.raises(millpond.Timeout):
        b.call("f", timeout=timeout)
    holder = threading.Thread(target=a._sending.acquire)
    holder.start()
    holder.join()
    with pytest.raises(millpond.Timeout, match="another thread has been sending"):
        a.send(1, timeout=timeout)
