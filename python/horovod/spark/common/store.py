"""Stores of intermediate data and checkpoints of estimators.

A path of a store is a URI, which Spark and pyarrow understand. Local files need nothing more, other file systems
``fsspec`` with the package for their scheme, and HDFS the ``libhdfs`` of a Hadoop installation.
"""

from __future__ import annotations

import posixpath
from typing import Any
from urllib.parse import urlsplit

from horovod.common.basics import warn_once

#: Name of a run's checkpoint.
CHECKPOINT = "checkpoint"
#: Name of the folder of a run's logs.
LOGS = "logs"


class Store:
    """The interface of a store. ``Store.create(path)`` chooses the class."""

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Create the store for a path.

        Args:
            prefix_path: A path or a URI: ``/data``, ``file:///data``, ``hdfs://host/data``, ``s3://bucket/data``,
                ``dbfs:/data``.
            *args: More arguments of the class.
            **kwargs: More keyword arguments of the class.

        Returns:
            The store.
        """
        for kind in (HDFSStore, DBFSLocalStore, LocalStore):
            if kind.matches(prefix_path):
                return kind(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether this class is for a path.

        Args:
            path: The path.

        Returns:
            ``True`` if this class is for a path.
        """
        return True


class FilesystemStore(Store):
    """A store below one path of a file system.

    Args:
        prefix_path: The path.
        train_path: Folder of training data; ``intermediate_train_data`` below the prefix by default.
        val_path: Folder of validation data; ``intermediate_val_data`` by default.
        test_path: Folder of test data; ``intermediate_test_data`` by default.
        runs_path: Folder of runs, with checkpoints and logs; ``runs`` by default.
        save_runs: Whether runs are saved.
        storage_options: Arguments of the file system of ``fsspec``; subclasses use other file systems.
        checkpoint_filename: Name of a run's checkpoint.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.prefix_path = self.get_full_path(prefix_path)
        self._train_path = train_path or posixpath.join(self.prefix_path, "intermediate_train_data")
        self._val_path = val_path or posixpath.join(self.prefix_path, "intermediate_val_data")
        self._test_path = test_path or posixpath.join(self.prefix_path, "intermediate_test_data")
        self._runs_path = runs_path or posixpath.join(self.prefix_path, "runs")
        self._save_runs = save_runs
        self.storage_options = storage_options or {}
        if self.storage_options and type(self).filesystem is not FilesystemStore.filesystem:
            warn_once(f"`storage_options` of {type(self).__name__} has no effect: it does not use fsspec")
        self._checkpoint_filename = checkpoint_filename or CHECKPOINT

    def get_full_path(self, path: str) -> str:
        """Return a path with its scheme.

        Args:
            path: The path.

        Returns:
            The URI.
        """
        return path.rstrip("/")

    def get_train_data_path(self, idx: Any = None) -> str:
        """Return the folder of training data.

        Args:
            idx: Name of the data set; none for the folder that all share.

        Returns:
            The URI.
        """
        return self._numbered(self._train_path, idx)

    def get_val_data_path(self, idx: Any = None) -> str:
        """Return the folder of validation data.

        Args:
            idx: Name of the data set; none for the folder that all share.

        Returns:
            The URI.
        """
        return self._numbered(self._val_path, idx)

    def get_test_data_path(self, idx: Any = None) -> str:
        """Return the folder of test data.

        Args:
            idx: Name of the data set; none for the folder that all share.

        Returns:
            The URI.
        """
        return self._numbered(self._test_path, idx)

    def _numbered(self, path: str, idx: Any) -> str:
        return path if idx is None else f"{path}.{idx}"

    def saving_runs(self) -> bool:
        """Return whether runs are saved.

        Returns:
            ``True`` if runs are saved.
        """
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the folder of all runs.

        Returns:
            The URI.
        """
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run.

        Args:
            run_id: Name of the run.

        Returns:
            The URI.
        """
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_filename(self) -> str:
        """Return the name of a run's checkpoint.

        Returns:
            The name.
        """
        return self._checkpoint_filename

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the checkpoint of a run.

        Args:
            run_id: Name of the run.

        Returns:
            The URI.
        """
        return posixpath.join(self.get_run_path(run_id), self._checkpoint_filename)

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of a run's logs.

        Args:
            run_id: Name of the run.

        Returns:
            The URI.
        """
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir())

    def get_logs_subdir(self) -> str:
        """Return the name of the folder of a run's logs.

        Returns:
            The name.
        """
        return LOGS

    def filesystem(self) -> Any:
        """Return the file system.

        Returns:
            A ``pyarrow.fs.FileSystem``.

        Raises:
            ImportError: ``fsspec``, or its package for the scheme, is not installed.
        """
        from pyarrow import fs

        scheme = urlsplit(self.prefix_path).scheme
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise ImportError(f"a store at `{self.prefix_path}` needs `pip install fsspec`", name=__name__) from error
        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme or "file", **self.storage_options)))

    def path_in_filesystem(self, path: str) -> str:
        """Return a path as :meth:`filesystem` names it.

        Args:
            path: The URI.

        Returns:
            The path without its scheme.
        """
        parts = urlsplit(path)
        return f"{parts.netloc}{parts.path}" if parts.scheme else path

    def exists(self, path: str) -> bool:
        """Return whether there is a file or a folder.

        Args:
            path: The URI.

        Returns:
            ``True`` if there is one.
        """
        from pyarrow import fs

        found = self.filesystem().get_file_info([self.path_in_filesystem(path)])[0]
        return bool(found.type != fs.FileType.NotFound)

    def read(self, path: str) -> bytes:
        """Read a file.

        Args:
            path: The URI.

        Returns:
            Its bytes.
        """
        with self.filesystem().open_input_stream(self.path_in_filesystem(path)) as file:
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        """Write a file, which appears under its name when it is complete.

        Args:
            path: The URI.
            data: Its bytes.
        """
        files, target = self.filesystem(), self.path_in_filesystem(path)
        files.create_dir(posixpath.dirname(target), recursive=True)
        with files.open_output_stream(f"{target}.part") as file:
            file.write(data)
        files.move(f"{target}.part", target)

    def write_text(self, path: str, text: str) -> None:
        """Write a file of text.

        Args:
            path: The URI.
            text: The text.
        """
        self.write(path, text.encode())

    def delete(self, path: str) -> None:
        """Delete a folder with its files, if it is there.

        Args:
            path: The URI.
        """
        if self.exists(path):
            self.filesystem().delete_dir(self.path_in_filesystem(path))

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether a folder holds a Parquet data set.

        Args:
            path: The URI.

        Returns:
            ``True`` if a folder holds a Parquet data set.
        """
        return self.exists(path) and bool(self.get_parquet_dataset(path).files)

    def get_parquet_dataset(self, path: str) -> Any:
        """Open a Parquet data set.

        Args:
            path: The URI of its folder.

        Returns:
            A ``pyarrow.dataset.Dataset``.
        """
        import pyarrow.dataset

        return pyarrow.dataset.dataset(self.path_in_filesystem(path), filesystem=self.filesystem(), format="parquet")


class LocalStore(FilesystemStore):
    """A store in a folder that all executors share, such as one of NFS.

    Args:
        prefix_path: The folder.
        *args: See :class:`FilesystemStore`.
        **kwargs: See :class:`FilesystemStore`.
    """

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a path is local.

        Args:
            path: The path.

        Returns:
            ``True`` if a path is local.
        """
        return urlsplit(path).scheme in ("", "file")

    def get_full_path(self, path: str) -> str:
        """Return the URI of a folder.

        Args:
            path: The folder.

        Returns:
            The URI.
        """
        import os

        return f"file://{os.path.abspath(urlsplit(path).path)}"

    def filesystem(self) -> Any:
        """Return the file system.

        Returns:
            A ``pyarrow.fs.FileSystem``.
        """
        from pyarrow import fs

        return fs.LocalFileSystem()


class DBFSLocalStore(LocalStore):
    """A store in Databricks' file system, which is mounted at ``/dbfs``.

    Args:
        prefix_path: A path that begins with ``dbfs:/``, ``/dbfs`` or ``file:///dbfs``.
        *args: See :class:`FilesystemStore`.
        **kwargs: See :class:`FilesystemStore`.
    """

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a path is one of Databricks' file system.

        Args:
            path: The path.

        Returns:
            ``True`` if a path is one of Databricks' file system.
        """
        return path.startswith(("dbfs:/", "/dbfs/", "file:///dbfs/"))

    def get_full_path(self, path: str) -> str:
        """Return the URI of a folder.

        Args:
            path: The folder.

        Returns:
            The URI at which it is mounted.
        """
        if path.startswith("dbfs:/"):
            path = "/dbfs/" + path.removeprefix("dbfs:/").lstrip("/")
        return super().get_full_path(path)


class HDFSStore(FilesystemStore):
    """A store in HDFS.

    Args:
        prefix_path: A path, or a URI ``hdfs://host:port/path``.
        host: The name node, if the path has none.
        port: Its port.
        user: The user.
        *args: See :class:`FilesystemStore`.
        **kwargs: See :class:`FilesystemStore`.
    """

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        parts = urlsplit(prefix_path)
        self._host = parts.hostname or host or "default"
        self._port = parts.port or port or 0
        self._user = user
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a path is one of HDFS.

        Args:
            path: The path.

        Returns:
            ``True`` if a path is one of HDFS.
        """
        return urlsplit(path).scheme == "hdfs"

    def filesystem(self) -> Any:
        """Return the file system.

        Returns:
            A ``pyarrow.fs.FileSystem``.

        Raises:
            OSError: ``libhdfs`` of Hadoop, or Java, cannot be loaded.
        """
        from pyarrow import fs

        return fs.HadoopFileSystem(self._host, self._port, user=self._user)

    def path_in_filesystem(self, path: str) -> str:
        """Return a path as :meth:`filesystem` names it.

        Args:
            path: The URI.

        Returns:
            The path without its scheme and host.
        """
        return urlsplit(path).path
