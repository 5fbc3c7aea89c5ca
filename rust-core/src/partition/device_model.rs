//! Rates of devices and links that time estimates use.

use crate::pipeline::LinkCost;

/// Rates of a device. Partitions and schedules depend only on their ratios.
#[derive(Clone, Copy, Debug)]
pub struct DeviceModel {
    /// Floating-point operations per nanosecond.
    pub flops_per_nanosecond: f64,
    /// Bytes per nanosecond that an operation can read and write.
    pub memory_bytes_per_nanosecond: f64,
    /// The minimum time of an operation, for the launch of its kernel.
    pub launch_nanoseconds: f64,
    /// Host time for a task of a pipeline, both on the rank that runs it and on ranks that only record it.
    pub task_nanoseconds: u64,
    /// A transfer to another device.
    pub link: LinkCost,
}

impl DeviceModel {
    /// Approximately a current accelerator that computes in bfloat16.
    pub const ACCELERATOR: Self = Self {
        flops_per_nanosecond: 400_000.0,
        memory_bytes_per_nanosecond: 3_000.0,
        launch_nanoseconds: 2_000.0,
        task_nanoseconds: 15_000,
        link: LinkCost { latency: 10_000, bytes_per_tick: 200 },
    };

    /// Approximately one processor core that computes in float32, with a fast network between hosts.
    pub const PROCESSOR: Self = Self {
        flops_per_nanosecond: 10.0,
        memory_bytes_per_nanosecond: 10.0,
        launch_nanoseconds: 1.0,
        task_nanoseconds: 15_000,
        link: LinkCost { latency: 10_000, bytes_per_tick: 10 },
    };

    /// Estimates the nanoseconds of an operation that computes `flops` and reads and writes `moved_bytes`: the slower
    /// of the two determines the time.
    pub fn operation_nanoseconds(&self, flops: f64, moved_bytes: u64) -> f64 {
        let arithmetic = flops / self.flops_per_nanosecond;
        arithmetic.max(moved_bytes as f64 / self.memory_bytes_per_nanosecond).max(self.launch_nanoseconds)
    }
}

#[test]
fn an_operation_takes_what_its_tightest_limit_allows() {
    let model = DeviceModel::ACCELERATOR;
    assert_eq!(model.operation_nanoseconds(0.0, 0), model.launch_nanoseconds);
    assert_eq!(model.operation_nanoseconds(4e9, 0), 10_000.0);
    assert_eq!(model.operation_nanoseconds(4e9, 60_000_000), 20_000.0);
}
