"""Jobs of Horovod on a Ray cluster.

The driver's process keeps the store and, for elastic jobs, the driver of ``horovod.runner``. Ray's actors are the
processes of the job.
"""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("`horovod.ray` needs Ray, which is not installed: `pip install ray`", name=__name__) from error

from horovod.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
from horovod.ray.elastic import RayHostDiscovery as RayHostDiscovery
from horovod.ray.runner import RayExecutor as RayExecutor
