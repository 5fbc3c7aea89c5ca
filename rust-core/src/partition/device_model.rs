//! What estimates of time assume of a device and of its links.

use crate::pipeline::LinkCost;

/// Rates of a device. Partitions and schedules depend on their proportions alone.
#[derive(Clone, Copy, Debug)]
pub struct DeviceModel {
    /// Floating-point operations in a nanosecond.
    pub flops_per_nanosecond: f64,
    /// Bytes that an operation reads and writes in a nanosecond.
    pub memory_bytes_per_nanosecond: f64,
    /// The least time of an operation: the launch of its kernel.
    pub launch_nanoseconds: f64,
    /// What a task of a pipeline takes of the host, on the rank that runs it and on those that only record it.
    pub task_nanoseconds: u64,
    /// A transfer to another device.
    pub link: LinkCost,
}

impl DeviceModel {
    /// About a current accelerator that computes in bfloat16.
    pub const ACCELERATOR: Self = Self {
        flops_per_nanosecond: 400_000.0,
        memory_bytes_per_nanosecond: 3_000.0,
        launch_nanoseconds: 2_000.0,
        task_nanoseconds: 15_000,
        link: LinkCost { latency: 10_000, bytes_per_tick: 200 },
    };

    /// About a core of a processor that computes in float32, with a fast network between hosts.
    pub const PROCESSOR: Self = Self {
        flops_per_nanosecond: 10.0,
        memory_bytes_per_nanosecond: 10.0,
        launch_nanoseconds: 1.0,
        task_nanoseconds: 15_000,
        link: LinkCost { latency: 10_000, bytes_per_tick: 10 },
    };

    /// Nanoseconds of an operation that needs `flops` and reads and writes `moved_bytes`: what limits it counts alone.
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
