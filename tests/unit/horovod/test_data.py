"""`horovod.data`: data loaders that prefetch."""

from __future__ import annotations

import pytest

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, fails_at=None):
        self.fails_at = fails_at

    def __len__(self):
        return 5

    def _iterate(self):
        for number in range(5):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            yield number

    def _process_batch(self, batch):
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [0, 1, 64])
def test_each_epoch_has_all_batches(size):
    loader = AsyncNumbers(size)
    for _ in range(3):
        assert list(loader) == [0, 10, 20, 30, 40]
    loader.close_async_loader()
    assert list(loader) == [0, 10, 20, 30, 40]
    # Closes the loader in the middle of an epoch.
    assert next(iter(loader)) == 0
    loader.close_async_loader()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [0, 4])
def test_errors_while_loading_reach_the_script(size):
    loader = AsyncNumbers(size, fails_at=2)
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(loader)
    loader.close_async_loader()


def test_a_loader_must_implement_iteration():
    with pytest.raises(NotImplementedError):
        list(BaseDataLoader())
