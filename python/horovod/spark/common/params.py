"""Parameters of estimators and models: ``pyspark.ml`` parameters with getters, setters and persistence."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, TypeVar

from pyspark import cloudpickle
from pyspark.ml.param import Param, Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from horovod.common.basics import warn_once

_Class = TypeVar("_Class", bound=type)

#: The meaning of a parameter that exists for compatibility begins with this. The reason follows.
_UNUSED = "without effect: "
_READER = f"{_UNUSED}pyarrow reads the files, in the process of the rank"
_TRANSFORMED = f"{_UNUSED}the result of `transformation_fn` has its own columns"
#: Parameters of all estimators: default and meaning.
ESTIMATOR: dict[str, tuple[Any, str]] = {
    "num_proc": (None, "number of processes; that of the backend by default"),
    "model": (None, "the model"),
    "backend": (None, "a Backend; SparkBackend(num_proc) by default"),
    "store": (None, "a Store for intermediate data and checkpoints"),
    "optimizer": (None, "the optimizer"),
    "loss": (None, "the loss, or one for each label"),
    "loss_weights": (None, "weights of the labels' losses; equal ones by default"),
    "metrics": ([], "metrics"),
    "feature_cols": (None, "columns that the model takes, in the order of its arguments"),
    "label_cols": (None, "columns of the labels, in the order of the model's outputs"),
    "validation": (None, "fraction of the rows, or name of a column that is true or positive for them"),
    "callbacks": ([], "callbacks of the training"),
    "batch_size": (32, "rows of each rank in a training step"),
    "val_batch_size": (None, "rows of each rank in a validation step; batch_size by default"),
    "epochs": (1, "number of epochs"),
    "verbose": (1, "0 prints nothing"),
    "shuffle_buffer_size": (
        None,
        "rows that are shuffled together; all rows of the rank by default, 0 does not shuffle",
    ),
    "shuffle": (True, "whether training rows are shuffled"),
    "partitions_per_process": (1, "files of intermediate data for each process"),
    "run_id": (None, "name of the run; a run with a checkpoint resumes from it"),
    "train_steps_per_epoch": (None, "steps of an epoch; by default each row is read at least once"),
    "validation_steps_per_epoch": (None, "steps of a validation; by default each row is read once"),
    "transformation_fn": (None, "takes a pandas data frame of rows and returns the one to train with"),
    "input_shapes": (None, "shape of each feature, with -1 for the rows"),
    "label_shapes": (None, "shape of each label, with -1 for the rows"),
    "custom_objects": (None, "custom objects of the model by name"),
    "sample_weight_col": (None, "column with the weights of rows"),
    "gradient_compression": (None, "a class of hvd.Compression"),
    "compress_sparse_cols": (False, f"{_UNUSED}vectors are stored as dense arrays"),
    "random_seed": (None, "seed of the split, of the order of rows (0 by default for both) and of the framework"),
    "backward_passes_per_step": (1, "batches of each optimizer step"),
    "use_gpu": (True, "whether ranks train on a GPU where there is one"),
    "mp_start_method": (None, f"{_UNUSED}ranks start no further processes"),
    "inmemory_cache_all": (False, f"{_UNUSED}ranks read the files again in each epoch"),
    "reader_pool_type": (None, _READER),
    "train_reader_num_workers": (None, _READER),
    "val_reader_num_workers": (None, _READER),
    "data_module": (None, _READER),
    "transformation_edit_fields": (None, _TRANSFORMED),
    "transformation_removed_fields": (None, _TRANSFORMED),
}
#: Parameters of all models.
MODEL: dict[str, tuple[Any, str]] = {
    "model": (None, "the trained model"),
    "history": (None, "metrics of the training"),
    "feature_columns": (None, "columns that the model takes"),
    "label_columns": (None, "columns of the labels"),
    "output_cols": (None, "columns of the outputs; `<label>__output` by default"),
    "input_shapes": (None, "shape of each feature, with -1 for the rows"),
    "custom_objects": (None, "custom objects of the model by name"),
    "batch_size": (256, "rows of one call of the model"),
    "run_id": (None, "name of the run"),
}


def with_params(table: dict[str, tuple[Any, str]]) -> Callable[[_Class], _Class]:
    """Decorate a class with parameters, and with methods such as ``setNumProc`` and ``getNumProc`` for them.

    Args:
        table: Default and meaning by name.

    Returns:
        The decorator.
    """

    def decorate(cls: _Class) -> _Class:
        defaults = {**getattr(cls, "_table", {}), **{name: default for name, (default, _) in table.items()}}
        setattr(cls, "_table", defaults)  # noqa: B010 - the type of `cls` does not have it
        for name, (_, doc) in table.items():
            setattr(cls, name, Param(Params._dummy(), name, doc))
            camel = "".join(word.capitalize() for word in name.split("_"))
            setattr(cls, f"set{camel}", _setter(name))
            setattr(cls, f"get{camel}", _getter(name))
        return cls

    return decorate


def _setter(name: str) -> Callable[..., Any]:
    def set_(self: Any, value: Any) -> Any:
        return self._set_all({name: value})

    set_.__doc__ = f"Set `{name}`, and return this object."
    return set_


def _getter(name: str) -> Callable[..., Any]:
    def get(self: Any) -> Any:
        return self.value(name)

    get.__doc__ = f"Return `{name}`."
    return get


class KeptParams(Params, MLReadable, MLWritable):
    """Parameters whose values are any objects. They are saved pickled, so load only files that you trust.

    Args:
        **params: Values by name.

    Raises:
        TypeError: A name is not that of a parameter.
    """

    _table: dict[str, Any]

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._set_all(params)

    def setParams(self, **params: Any) -> Any:  # noqa: N802 - the name in pyspark.ml
        """Set parameters.

        Args:
            **params: Values by name.

        Returns:
            This object.

        Raises:
            TypeError: A name is not that of a parameter.
        """
        return self._set_all(params)

    def value(self, name: str) -> Any:
        """Return the value of a parameter.

        Args:
            name: Its name.

        Returns:
            The value that was set, or the default.
        """
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else self._table[name]

    def _set_all(self, params: dict[str, Any]) -> Any:
        unknown = sorted(set(params) - set(self._table))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no parameters {unknown}: there are {sorted(self._table)}")
        self._warn_unused(params)
        for name, value in params.items():
            if value is None:
                self.clear(self.getParam(name))
            else:
                self._paramMap[self.getParam(name)] = value
        return self

    def _warn_unused(self, params: dict[str, Any]) -> None:
        """Warn once of each parameter that is set and not used."""
        for name, value in params.items():
            doc, default = self.getParam(name).doc, self._table[name]
            if not doc.startswith(_UNUSED) or value is None:
                continue
            # A value of another type, such as an array, may not compare to one result.
            if not (isinstance(value, type(default)) and value == default):
                warn_once(f"`{name}` of {type(self).__name__} has no effect: {doc.removeprefix(_UNUSED)}")

    def write(self) -> MLWriter:
        """Return the writer: ``object.write().overwrite().save(path)``.

        Returns:
            The writer.
        """
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader:
        """Return the reader: ``Class.load(path)``.

        Returns:
            The reader.
        """
        return _Reader(cls)


class _Writer(MLWriter):
    def __init__(self, instance: KeptParams) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - the name in pyspark.ml
        values = {param.name: value for param, value in self.instance._paramMap.items()}
        values.pop("backend", None)
        text = base64.b64encode(cloudpickle.dumps(values)).decode()
        DefaultParamsWriter.saveMetadata(
            self.instance, path, self.sparkSession, extraMetadata={"values": text}, paramMap={"values": ""}
        )


class _Reader(MLReader):
    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        instance = self.cls()
        instance._resetUid(metadata["uid"])
        return instance._set_all(cloudpickle.loads(base64.b64decode(metadata["values"])))
