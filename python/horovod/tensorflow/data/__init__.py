"""TensorFlow's data service beside a training job: a job of its own prepares the data.

Example:
    ::

        horovodrun -np 2 python -m horovod.tensorflow.data.compute_worker /shared/service.json     # prepares
        horovodrun -np 4 python train.py /shared/service.json                                      # trains

    and in ``train.py``::

        config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
        dataset = dataset.send_to_data_service(config, hvd.rank())
"""

from horovod.tensorflow.data.compute_service import TfDataServiceConfig as TfDataServiceConfig
from horovod.tensorflow.data.compute_service import compute_worker_fn as compute_worker_fn
from horovod.tensorflow.data.compute_service import send_to_data_service as send_to_data_service
from horovod.tensorflow.data.compute_service import tf_data_service as tf_data_service
