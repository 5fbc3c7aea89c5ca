//! The progress of one backward: which gradients are ready, and which buckets may be reduced. A value without threads
//! or tensor memory.
//!
//! ```text
//! mark_ready(p) .. mark_ready(q): the last gradient of bucket 0 -> launch [0]
//! mark_ready(r): the last one of bucket 2, bucket 1 is not full  -> launch []
//! mark_ready(s): the last one of bucket 1                        -> launch [1, 2]
//! ```
//!
//! - STEP-1: whatever the order of gradients, buckets are launched in plan order, each once (RED-2).

use std::ops::Range;

use super::BucketPlan;

/// Counts the gradients of one backward and returns the buckets that may be reduced.
#[derive(Clone, Debug)]
pub struct Step {
    ready: Vec<bool>,
    /// Parameters in the order in which their gradients became ready.
    order: Vec<usize>,
    /// For each bucket, the number of gradients that are not ready.
    pending: Vec<usize>,
    /// The first bucket that is not launched yet.
    launched: usize,
}

impl Step {
    /// The start of a backward under `plan`.
    pub fn new(plan: &BucketPlan) -> Self {
        Self {
            ready: vec![false; plan.num_params()],
            order: Vec::with_capacity(plan.num_params()),
            pending: plan.buckets().iter().map(|bucket| bucket.slots.len()).collect(),
            launched: 0,
        }
    }

    /// Marks a gradient as ready, and returns the buckets that may be reduced now; `None` if it was ready already.
    pub fn mark_ready(&mut self, plan: &BucketPlan, param: usize) -> Option<Range<usize>> {
        if std::mem::replace(&mut self.ready[param], true) {
            return None;
        }
        self.order.push(param);
        self.pending[plan.bucket_of(param)] -= 1;
        let start = self.launched;
        while self.pending.get(self.launched) == Some(&0) {
            self.launched += 1;
        }
        Some(start..self.launched)
    }

    /// Parameters without a gradient, by index.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.ready.len()).filter(|&param| !self.ready[param]).collect()
    }

    /// All parameters: first those with gradients, in the order in which they became ready, then the others by index.
    pub fn observed_order(&self) -> Vec<usize> {
        let mut order = self.order.clone();
        order.extend(self.missing());
        order
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::buffer::DType;
    use crate::reducer::{ParamSpec, ReducerOptions};

    fn plan(num_params: usize, per_bucket: usize) -> BucketPlan {
        let params: Vec<ParamSpec> =
            (0..num_params).map(|i| ParamSpec::dense(format!("p{i}"), [16], DType::Float32)).collect();
        let bytes = per_bucket * 64;
        BucketPlan::initial(&params, &ReducerOptions { bucket_bytes: vec![bytes], ..ReducerOptions::default() })
    }

    #[test]
    fn a_bucket_waits_for_those_before_it() {
        let plan = plan(6, 2);
        let mut step = Step::new(&plan);
        assert_eq!(step.mark_ready(&plan, 5), Some(0..0));
        assert_eq!(step.mark_ready(&plan, 4), Some(0..1));
        assert_eq!(step.mark_ready(&plan, 0), Some(1..1));
        assert_eq!(step.mark_ready(&plan, 1), Some(1..1));
        assert_eq!(step.missing(), [2, 3]);
        assert_eq!(step.mark_ready(&plan, 2), Some(1..1));
        assert_eq!(step.mark_ready(&plan, 3), Some(1..3));
        assert!(step.missing().is_empty());
        assert_eq!(step.observed_order(), [5, 4, 0, 1, 2, 3]);
    }

    #[test]
    fn a_second_gradient_of_a_parameter_is_noticed() {
        let plan = plan(2, 2);
        let mut step = Step::new(&plan);
        assert!(step.mark_ready(&plan, 1).is_some());
        assert_eq!(step.mark_ready(&plan, 1), None);
        assert_eq!(step.observed_order(), [1, 0]);
    }

    proptest! {
        #[test]
        fn every_bucket_is_launched_once_in_order(per_bucket in 1usize..5, order in Just((0..17).collect::<Vec<usize>>()).prop_shuffle()) {
            let plan = plan(17, per_bucket);
            let mut step = Step::new(&plan);
            let mut launched = Vec::new();
            for &param in &order {
                launched.extend(step.mark_ready(&plan, param).unwrap());
            }
            prop_assert_eq!(launched, (0..plan.buckets().len()).collect::<Vec<_>>());
            prop_assert_eq!(step.observed_order(), order);
        }
    }
}
