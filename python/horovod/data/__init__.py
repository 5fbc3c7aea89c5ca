"""Data loaders that load batches ahead while the last batch is trained on."""

from __future__ import annotations

from horovod.data.data_loader_base import AsyncDataLoaderMixin as AsyncDataLoaderMixin
from horovod.data.data_loader_base import BaseDataLoader as BaseDataLoader
