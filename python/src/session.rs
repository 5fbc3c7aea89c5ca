//! Life cycle, ranks and groups.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use smd_core::collectives::Request;
use smd_core::config;
use smd_core::negotiation::timeline;
use smd_core::reducer::ballot;
use smd_core::session::place::{self, Place};
use smd_core::session::{self, InitOptions, Session, replicas};
use smd_core::transport::mpi;
use smd_core::world::env;

use crate::enter::enter;

/// How long to wait for another process to compile the MPI plug-in.
const MPI_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn with<T: Send>(
    py: Python<'_>,
    call: &'static str,
    body: impl FnOnce(&Session) -> smd_core::Result<T> + Send,
) -> PyResult<T> {
    enter(py, || body(&*session::current(call)?))
}

/// Returns this process's place in the job, which a forked child has, too.
pub(crate) fn query_place<T: Send>(
    py: Python<'_>,
    call: &'static str,
    answer: impl FnOnce(Place) -> smd_core::Result<T> + Send,
) -> PyResult<T> {
    enter(py, || answer(place::place(call)?))
}

/// Joins the job that the environment describes; returns when all ranks have joined.
#[pyfunction]
fn init(py: Python<'_>) -> PyResult<()> {
    enter(py, || session::init(InitOptions::default()).map(drop))
}

/// Leaves the job. Does nothing without a session.
#[pyfunction]
fn shutdown(py: Python<'_>) -> PyResult<()> {
    enter(py, || {
        session::shutdown();
        Ok(())
    })
}

/// Called last in a process: `shutdown()`, then, in the process that serves the rendezvous, waits for the others.
#[pyfunction]
fn finish(py: Python<'_>) -> PyResult<()> {
    enter(py, || {
        session::finish();
        Ok(())
    })
}

/// Starts the negotiation of collectives by name among all ranks, so that a rank that never calls one is reported as
/// missing. Does not wait for the others, and does nothing on a second call.
#[pyfunction]
fn start_negotiation(py: Python<'_>) -> PyResult<()> {
    enter(py, || session::current("start_negotiation")?.negotiator(0).map(drop))
}

/// Whether this process is in a job, or was forked from a process that is.
#[pyfunction]
fn is_initialized() -> bool {
    session::is_initialized()
}

/// Global rank.
#[pyfunction]
fn rank(py: Python<'_>) -> PyResult<usize> {
    query_place(py, "rank", |place| Ok(place.rank))
}

/// Number of processes of the job.
#[pyfunction]
fn size(py: Python<'_>) -> PyResult<usize> {
    query_place(py, "size", |place| Ok(place.size))
}

/// Rank on this host.
#[pyfunction]
fn local_rank(py: Python<'_>) -> PyResult<usize> {
    query_place(py, "local_rank", |place| Ok(place.local_rank))
}

/// Number of processes on this host.
#[pyfunction]
fn local_size(py: Python<'_>) -> PyResult<usize> {
    query_place(py, "local_size", |place| Ok(place.local_size))
}

/// A number that is equal on all ranks and new for each `init()`.
#[pyfunction]
fn session_id(py: Python<'_>) -> PyResult<u64> {
    with(py, "session_id", |session| Ok(session.id()))
}

/// Whether all members have proved a secret of the job; false for a job on several hosts without a secret.
#[pyfunction]
fn is_authenticated(py: Python<'_>) -> PyResult<bool> {
    with(py, "is_authenticated", |session| Ok(session.is_authenticated()))
}

/// Creates a group of global ranks, in their order inside the group, and returns its id. All members call it.
#[pyfunction]
fn new_group(py: Python<'_>, ranks: Vec<usize>) -> PyResult<u64> {
    with(py, "new_group", |session| Ok(session.new_group(&ranks)?.id()))
}

/// Removes a group; each member calls it for itself.
#[pyfunction]
fn remove_group(py: Python<'_>, group: u64) -> PyResult<()> {
    with(py, "remove_group", |session| session.remove_group(group))
}

/// Global ranks of a group, in group order; 0 is the group of all.
#[pyfunction]
#[pyo3(signature = (group=0))]
fn group_ranks(py: Python<'_>, group: u64) -> PyResult<Vec<usize>> {
    with(py, "group_ranks", |session| Ok(session.communicator(group)?.members().ranks.to_vec()))
}

/// The best size in bytes of a reducer's buckets on a CUDA device, if `SMD_AUTOTUNE` enables its measurement for the
/// group. Collective.
#[pyfunction]
fn measure_bucket_bytes(py: Python<'_>, group: u64, device: u16) -> PyResult<Option<usize>> {
    with(py, "measure_bucket_bytes", |session| session.communicator(group)?.measure_bucket_bytes(device))
}

/// Returns when every member of the group has called it.
#[pyfunction]
#[pyo3(signature = (group=0))]
fn barrier(py: Python<'_>, group: u64) -> PyResult<()> {
    with(py, "barrier", |session| session.communicator(group)?.run(&Request::Barrier))
}

/// Reports to the job that this rank failed with `message`; waits of the others end with it. Does nothing without a
/// session.
#[pyfunction]
fn report_failure(py: Python<'_>, message: &str) -> PyResult<()> {
    enter(py, || {
        if let Ok(session) = session::current("report_failure") {
            session.report_failure(message);
        }
        Ok(())
    })
}

/// Ends every wait of this process and its part in the job, for a Ctrl-C that a waiting thread cannot notice itself.
/// Does nothing without a session.
#[pyfunction]
fn interrupt(py: Python<'_>) -> PyResult<()> {
    enter(py, || {
        if let Ok(session) = session::current("interrupt") {
            session.interrupt();
        }
        Ok(())
    })
}

/// Returns the time, in seconds since 1970, at which the launcher of an elastic job found changed hosts, and whether
/// places were removed (1), added (2) or both (3); waits at most `seconds`. `None` if nothing changed, or without a
/// session.
#[pyfunction]
fn next_hosts_update(py: Python<'_>, seconds: f64) -> PyResult<Option<(f64, u8)>> {
    let timeout = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    enter(py, || {
        let Ok(session) = session::current("next_hosts_update") else {
            std::thread::sleep(timeout);
            return Ok(None);
        };
        let update = session.next_hosts_updated(timeout);
        Ok(update.map(|update| (update.at_micros as f64 / 1e6, update.kinds)))
    })
}

/// Combines the ranks' knowledge of changed hosts: the latest change that was handled and the latest one that is
/// known, in microseconds since 1970, and the kinds of unhandled changes. Every rank calls it with its own values.
#[pyfunction]
fn combine_host_updates(py: Python<'_>, handled: u64, latest: u64, kinds: u8) -> PyResult<(u64, u64, u8)> {
    enter(py, || session::current("check_host_updates")?.combine_host_updates(handled, latest, kinds))
}

/// Waits until the number of rounds of optimizers whose gradients were held and are reduced by name after all is not
/// `seen`, at most `seconds`; returns the number.
#[pyfunction]
fn declined_rounds(py: Python<'_>, seen: u64, seconds: f64) -> PyResult<u64> {
    let timeout = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    enter(py, || Ok(ballot::wait_for_declined(seen, timeout)))
}

/// From now on, rank 0 writes a timeline of collectives by name to this file; other ranks do nothing.
#[pyfunction]
fn start_horovod_timeline(py: Python<'_>, path: &str, mark_cycles: bool) -> PyResult<()> {
    with(py, "start_timeline", |session| {
        session.start_horovod_timeline(path, mark_cycles);
        Ok(())
    })
}

/// Ends that timeline; the file is complete when this returns.
#[pyfunction]
fn stop_horovod_timeline(py: Python<'_>) -> PyResult<()> {
    enter(py, || {
        timeline::stop();
        Ok(())
    })
}

/// Whether an MPI launcher started this process.
#[pyfunction]
fn is_started_by_mpi() -> bool {
    env::started_by_mpi(&env::variables())
}

/// Writes a checksum of the variables `variables` that this rank is about to train together with `ranks`. If checksums
/// differ, the first of the ranks logs a warning with the call `remedy`: at once if `is_final`, otherwise in the
/// second step if nothing was broadcast until then.
#[pyfunction]
fn report_replica_checksum(
    py: Python<'_>,
    variables: String,
    checksum: u64,
    ranks: Vec<usize>,
    remedy: String,
    is_final: bool,
) -> PyResult<()> {
    let replica =
        replicas::ReplicaChecksum { variables: &variables, checksum, ranks: &ranks, remedy: &remedy, is_final };
    with(py, "report_replica_checksum", |session| session.report_replica_checksum(&replica))
}

/// Notes that variables are broadcast, so ranks train from equal values.
#[pyfunction]
fn note_broadcast(py: Python<'_>) -> PyResult<()> {
    with(py, "note_broadcast", |session| {
        session.replicas().note_broadcast();
        Ok(())
    })
}

/// Notes the beginning of a step of a reduction that the core cannot observe.
#[pyfunction]
fn begin_step(py: Python<'_>, name: &str) -> PyResult<()> {
    with(py, "begin_step", |session| {
        session.replicas().begin_step(name);
        Ok(())
    })
}

/// Initialises MPI in all processes of a job that an MPI launcher started, unless the script has. Every rank calls it.
/// Returns whether any thread may call MPI.
#[pyfunction]
fn start_mpi(py: Python<'_>) -> PyResult<bool> {
    with(py, "start_mpi", |session| session.start_mpi(Instant::now() + config::INIT_TIMEOUT_SECONDS.seconds()?))
}

/// The path of the MPI plug-in for this host, which is compiled if necessary.
#[pyfunction]
fn mpi_plugin(py: Python<'_>) -> PyResult<String> {
    enter(py, || mpi::provide(Instant::now() + MPI_LIMIT).map(|path| path.display().to_string()))
}

/// Whether the environment has a launcher's variables.
#[pyfunction]
fn is_launched(py: Python<'_>) -> PyResult<bool> {
    enter(py, || Ok(env::detect(&env::variables())?.launcher != env::Launcher::Single))
}

/// Names and values of the variables of torch's `env://` that the launcher did not set, for the caller to set them.
/// The next `init()` ignores them.
#[pyfunction]
fn missing_environment(py: Python<'_>) -> PyResult<Vec<(&'static str, String)>> {
    enter(py, || {
        let variables = env::variables();
        let missing = match session::current("missing_environment") {
            Ok(session) => session.launch().missing_variables(&variables),
            Err(_) => env::detect(&variables)?.missing_variables(&variables),
        };
        env::remember_exports(&missing);
        Ok(missing)
    })
}

/// Adds this file's functions.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(init, module)?)?;
    module.add_function(wrap_pyfunction!(shutdown, module)?)?;
    module.add_function(wrap_pyfunction!(finish, module)?)?;
    module.add_function(wrap_pyfunction!(start_negotiation, module)?)?;
    module.add_function(wrap_pyfunction!(is_initialized, module)?)?;
    module.add_function(wrap_pyfunction!(rank, module)?)?;
    module.add_function(wrap_pyfunction!(size, module)?)?;
    module.add_function(wrap_pyfunction!(local_rank, module)?)?;
    module.add_function(wrap_pyfunction!(local_size, module)?)?;
    module.add_function(wrap_pyfunction!(session_id, module)?)?;
    module.add_function(wrap_pyfunction!(is_authenticated, module)?)?;
    module.add_function(wrap_pyfunction!(new_group, module)?)?;
    module.add_function(wrap_pyfunction!(remove_group, module)?)?;
    module.add_function(wrap_pyfunction!(group_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(measure_bucket_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(barrier, module)?)?;
    module.add_function(wrap_pyfunction!(report_failure, module)?)?;
    module.add_function(wrap_pyfunction!(interrupt, module)?)?;
    module.add_function(wrap_pyfunction!(combine_host_updates, module)?)?;
    module.add_function(wrap_pyfunction!(start_horovod_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(stop_horovod_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(next_hosts_update, module)?)?;
    module.add_function(wrap_pyfunction!(declined_rounds, module)?)?;
    module.add_function(wrap_pyfunction!(is_started_by_mpi, module)?)?;
    module.add_function(wrap_pyfunction!(report_replica_checksum, module)?)?;
    module.add_function(wrap_pyfunction!(note_broadcast, module)?)?;
    module.add_function(wrap_pyfunction!(begin_step, module)?)?;
    module.add_function(wrap_pyfunction!(start_mpi, module)?)?;
    module.add_function(wrap_pyfunction!(mpi_plugin, module)?)?;
    module.add_function(wrap_pyfunction!(is_launched, module)?)?;
    module.add_function(wrap_pyfunction!(missing_environment, module)?)
}
