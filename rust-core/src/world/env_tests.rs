//! A table of environments.

use super::*;

fn variables(text: &str) -> Variables {
    text.split_whitespace()
        .map(|pair| {
            let (name, value) = pair.split_once('=').expect("the table has NAME=value");
            (name.to_owned(), value.to_owned())
        })
        .collect()
}

fn found(text: &str) -> (Launcher, usize, usize, Option<(usize, usize)>) {
    let launch = detect(&variables(text)).unwrap();
    (launch.launcher, launch.rank, launch.size, launch.local)
}

const OMPI_1_OF_4: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                           OMPI_COMM_WORLD_LOCAL_SIZE=2";
const SRUN_0_OF_2: &str = "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_NODEID=0 \
                           SLURM_STEP_TASKS_PER_NODE=1(x2)";

#[test]
fn each_launcher_is_understood() {
    use Launcher::*;
    let table = [
        ("", (Single, 0, 1, Some((0, 1)))),
        ("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2", (Torch, 2, 4, Some((0, 2)))),
        ("RANK=2 WORLD_SIZE=4", (Torch, 2, 4, None)),
        ("RANK=2 WORLD_SIZE=4 LOCAL_RANK=2", (Torch, 2, 4, None)),
        (OMPI_1_OF_4, (OpenMpi, 1, 4, Some((1, 2)))),
        ("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (Pmi, 3, 4, Some((1, 2)))),
        ("PMI_RANK=3 PMI_SIZE=4", (Pmi, 3, 4, None)),
        (
            "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_TASKS_PER_NODE=2(x3),1",
            (Slurm, 5, 7, Some((1, 2))),
        ),
        (SRUN_0_OF_2, (Slurm, 0, 2, Some((0, 1)))),
        // A size alone, an empty value, and a batch script's own variables are no launcher.
        ("WORLD_SIZE=4 RANK= ", (Single, 0, 1, Some((0, 1)))),
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=1", (Single, 0, 1, Some((0, 1)))),
    ];
    for (text, expected) in table {
        assert_eq!(found(text), expected, "{text}");
    }
}

#[test]
fn launchers_that_agree_complete_each_other() {
    let text = format!("RANK=1 WORLD_SIZE=4 {OMPI_1_OF_4}");
    assert_eq!(found(&text), (Launcher::Torch, 1, 4, Some((1, 2))));
    // Only the rank was passed on by hand.
    let text = format!("RANK=1 {OMPI_1_OF_4}");
    assert_eq!(found(&text), (Launcher::Torch, 1, 4, Some((1, 2))));
}

#[test]
fn torchrun_inside_srun_is_no_conflict() {
    let torchrun = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2";
    assert_eq!(found(&format!("{torchrun} {SRUN_0_OF_2}")), (Launcher::Torch, 3, 4, Some((1, 2))));
    // With its PMI plug-in, srun sets these too.
    let pmi = "PMI_RANK=0 PMI_SIZE=2";
    assert_eq!(found(&format!("{torchrun} {SRUN_0_OF_2} {pmi}")), (Launcher::Torch, 3, 4, Some((1, 2))));
}

#[test]
fn errors_name_variables_and_values() {
    let table = [
        ("RANK=1", "`RANK` is 1 but `WORLD_SIZE` is not set"),
        ("RANK=one WORLD_SIZE=2", "`RANK` is `one`: expected a whole number"),
        ("RANK=-1 WORLD_SIZE=2", "`RANK` is `-1`: expected a whole number"),
        ("RANK=0 WORLD_SIZE=4294967295", "`WORLD_SIZE` is `4294967295`: expected a whole number"),
        ("RANK=2 WORLD_SIZE=2", "`RANK` is 2 but `WORLD_SIZE` is 2: expected a rank below the size"),
        ("RANK=0 WORLD_SIZE=0", "`RANK` is 0 but `WORLD_SIZE` is 0: expected a rank below the size"),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2",
            "`LOCAL_RANK` is 3 but `LOCAL_WORLD_SIZE` is 2: expected a rank below the size",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3",
            "`LOCAL_WORLD_SIZE` is 3, more than `WORLD_SIZE`, which is 2",
        ),
        (
            "RANK=0 WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4",
            "`RANK` is 0 but `OMPI_COMM_WORLD_RANK` is 1: two launchers disagree about the rank; unset the variables \
             of the one that did not start this process",
        ),
        (
            "RANK=1 WORLD_SIZE=8 PMI_RANK=1 PMI_SIZE=4",
            "`WORLD_SIZE` is 8 but `PMI_SIZE` is 4: two launchers disagree about the world size; unset the variables \
             of the one that did not start this process",
        ),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=0", "`MASTER_PORT` is `0`: expected a port, 1 to 65535"),
        (
            "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=2(y3)",
            "`SLURM_TASKS_PER_NODE` is `2(y3)`: expected a list such as `2(x3),1`",
        ),
    ];
    for (text, expected) in table {
        let error = detect(&variables(text)).unwrap_err();
        assert_eq!(error.code(), crate::error::Code::Config, "{text}");
        assert_eq!(error.to_string(), expected, "{text}");
    }
}

#[test]
fn the_host_of_rank_0() {
    let table = [
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=node7 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2", Some("node7")),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2", Some("127.0.0.1")),
        ("RANK=0 WORLD_SIZE=2", None),
        (r#"RANK=0 WORLD_SIZE=2 SM_HOSTS=["algo-2","algo-1"]"#, Some("algo-1")),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_orte_hnp_uri=12.0;tcp://10.0.0.1,10.1.0.1:4000",
            Some("10.0.0.1"),
        ),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=prterun-node-1-7152@1", Some("node-1")),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=slurm.pmix.7.0", None),
        ("PMI_RANK=0 PMI_SIZE=2 HYDRA_CONTROL_PORT=node-1:35759", Some("node-1")),
        ("SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n[03-07,9]-ib,login", Some("n03-ib")),
        ("SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=alpha,beta[1-2]", Some("alpha")),
    ];
    for (text, expected) in table {
        assert_eq!(detect(&variables(text)).unwrap().master_addr.as_deref(), expected, "{text}");
    }
}

#[test]
fn ports_are_the_same_on_all_ranks_and_differ_between_jobs() {
    let ports = |text: &str| detect(&variables(text)).unwrap().rendezvous_ports();
    let job = "WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500";
    assert_eq!(ports(&format!("RANK=0 {job}")), ports(&format!("RANK=1 {job}")));
    assert_ne!(ports(&format!("RANK=0 {job}")), ports(&format!("RANK=0 {job} TORCHELASTIC_RESTART_COUNT=1")));
    // Two jobs of MPICH differ in nothing else.
    let mpich = |port: u16| ports(&format!("PMI_RANK=0 PMI_SIZE=2 HYDRA_CONTROL_PORT=a:{port}"));
    assert_ne!(mpich(1), mpich(2));
    for port in ports(&format!("RANK=0 {job}")) {
        assert!((FIRST_PORT..FIRST_PORT + NUM_PORTS).contains(&port));
    }
}

#[test]
fn torch_gets_what_it_lacks() {
    let variables = variables(&format!("{OMPI_1_OF_4} RANK=1 MASTER_ADDR=a"));
    let launch = detect(&variables).unwrap();
    let missing = launch.missing_variables(&variables);
    let names: Vec<&str> = missing.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]);
    assert_eq!(missing[3].1, launch.master_port.to_string());
}
