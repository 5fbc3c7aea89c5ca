"""Data sets and stores of Spark's estimators, tested without a cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: `make test-engines` installs it")
pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: `make test-engines` installs it")

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow has no Parquet")

from horovod.spark.common.reader import Shard  # noqa: E402
from horovod.spark.common.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store  # noqa: E402


def write_dataset(folder, groups):
    """Writes a data set with row groups of these sizes; returns its store and path."""
    store, first = Store.create(str(folder)), 0
    path = store.get_train_data_path()
    (folder / "intermediate_train_data").mkdir()
    for number, rows in enumerate(groups):
        values = list(range(first, first + rows))
        table = pyarrow.table({"number": values, "vector": [[value, value / 2] for value in values]})
        parquet.write_table(table, folder / "intermediate_train_data" / f"{number}.parquet")
        first += rows
    return store, path


@pytest.mark.parametrize("groups", [[10], [4, 4, 4], [7, 1, 1, 1, 9, 2], [100, 3]])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, (5, 1)])
def test_ranks_read_each_row_once(tmp_path, groups, size, seed):
    store, path = write_dataset(tmp_path, groups)
    seen = []
    for rank in range(size):
        shard = Shard(store, path, ["number", "vector"], rank, size)
        for batch in shard.batches(4, seed=seed, buffer_size=5):
            assert batch["vector"].shape == (len(batch["number"]), 2)
            assert (batch["vector"][:, 0] == batch["number"]).all()
            seen += batch["number"].tolist()
    assert sorted(seen) == list(range(sum(groups)))


def test_all_ranks_take_the_same_steps(tmp_path):
    store, path = write_dataset(tmp_path, [9, 3])
    shards = [Shard(store, path, ["number"], rank, 2) for rank in range(2)]
    assert [shard.rows for shard in shards] == [9, 3]
    assert [shard.steps(2) for shard in shards] == [5, 5]
    assert [len(list(shard.batches(2, 5))) for shard in shards] == [5, 5]
    again = [batch["number"].tolist() for batch in shards[1].batches(2, 5)]
    assert again == [[9, 10], [11], [9, 10], [11], [9, 10]]


def test_data_that_cannot_be_read(tmp_path):
    store, path = write_dataset(tmp_path, [1])
    with pytest.raises(ValueError, match="has 1 rows: each of 2 ranks needs at least one"):
        Shard(store, path, ["number"], 0, 2)
    columns = {"null": [None, 1], "ragged": [[1], [1, 2]], "text": ["a", "b"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "intermediate_train_data" / "0.parquet")
    for name, why in {"null": "1 null", "ragged": "different lengths", "text": "of type string"}.items():
        with pytest.raises(ValueError, match=f"column `{name}`.*{why}|`{name}` {why}|`{name}` is {why}"):
            list(Shard(store, path, [name], 0, 1).batches(2))


def test_kinds_of_stores(tmp_path):
    kinds = {
        str(tmp_path): LocalStore,
        f"file://{tmp_path}": LocalStore,
        "dbfs:/data": DBFSLocalStore,
        "/dbfs/data": DBFSLocalStore,
        "hdfs://host:9000/data": HDFSStore,
        "s3://bucket/data": FilesystemStore,
    }
    assert {path: type(Store.create(path)) for path in kinds} == kinds
    assert Store.create("dbfs:/data").get_train_data_path(3) == "file:///dbfs/data/intermediate_train_data.3"
    assert Store.create("s3://bucket/data").get_checkpoint_path("run") == "s3://bucket/data/runs/run/checkpoint"


@pytest.mark.parametrize("prefix", ["local", "fsspec", "memory://data"])
def test_files_of_a_store(tmp_path, prefix):
    if prefix != "local":
        pytest.importorskip("fsspec", reason="fsspec is not installed")
    folder = prefix if prefix.startswith("memory") else f"file://{tmp_path}"
    store = Store.create(folder) if prefix == "local" else FilesystemStore(folder)
    path = store.get_checkpoint_path("run")
    assert not store.exists(path)
    store.write(path, b"first")
    store.write_text(path, "second")
    assert store.exists(path)
    assert store.read(path) == b"second"
    store.delete(store.get_run_path("run"))
    store.delete(store.get_run_path("run"))
    assert not store.exists(path)
