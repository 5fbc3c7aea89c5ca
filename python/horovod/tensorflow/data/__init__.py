"""TensorFlow's data service beside a training job: a second job prepares the data."""

from horovod.tensorflow.data.compute_service import TfDataServiceConfig as TfDataServiceConfig
from horovod.tensorflow.data.compute_service import compute_worker_fn as compute_worker_fn
from horovod.tensorflow.data.compute_service import send_to_data_service as send_to_data_service
from horovod.tensorflow.data.compute_service import tf_data_service as tf_data_service
