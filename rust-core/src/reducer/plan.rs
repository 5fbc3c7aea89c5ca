//! The bucket plan: the slot of each parameter's gradient, and the order in which buckets are reduced.
//!
//! - PLAN-1: every parameter has exactly one slot in a set; slots of a window do not overlap. Buckets and slots start
//!   at multiples of [`ALIGN`] bytes. Where the caller reduces buckets, slots are adjacent instead, so that a bucket
//!   contains only its gradients.
//! - PLAN-2: a bucket holds one element type, and its slots in the order in which gradients are expected.
//! - PLAN-3: a bucket is at most as large as the cap, unless one parameter alone is larger. On a device, where each
//!   operation has a fixed cost, the parameter that makes a bucket exceed the cap is included. Exception: the last
//!   bucket of a device (PLAN-8).
//! - PLAN-4: delayed parameters share no bucket with others, and their buckets come last.
//! - PLAN-5: the plan depends on the parameters, the order and the options only.
//! - PLAN-6: a parameter whose gradient is reduced in place ([`ReducerOptions::reduces_in_place`]) has a slot of length
//!   0 in the bucket's memory.
//! - PLAN-7: where the core reduces buckets in slots, there is a second set of slots. A tensor of the caller may keep
//!   a slot beyond the step, such as a momentum that is computed in the gradient's memory, and the next gradient then
//!   uses the other slot. The system provides its memory only when it is first written.
//! - PLAN-8: while a device's last bucket is reduced, no computation overlaps with it. So it contains little more
//!   than the last gradient, which cannot be reduced earlier: only small gradients before it.

use super::{BucketReduction, ParamSpec, ReducerOptions};
use crate::buffer::DType;

/// Alignment of buckets and, except in PLAN-1's special case, of slots, in bytes: a cache line, and the widest vector
/// register.
pub const ALIGN: usize = 64;
/// Largest size in bytes of the other gradients in the last bucket of a device.
const LAST_BUCKET_BYTES: usize = 1 << 20;
/// Number of sets of slots (PLAN-7).
pub const MAX_COPIES: usize = 2;

/// The slot of one parameter's gradient in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Index of the parameter.
    pub param: usize,
    /// Start in the window, in bytes.
    pub offset_bytes: usize,
    /// Length in bytes, without padding; 0 if the gradient is reduced in place (PLAN-6).
    pub bytes: usize,
    /// Whether the gradient is reduced in place (PLAN-6).
    pub in_place: bool,
}

/// Gradients that are reduced together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Element type of all its parameters.
    pub dtype: DType,
    /// Start in the window, in bytes.
    pub offset_bytes: usize,
    /// Length in bytes, with padding between slots but not after the last.
    pub bytes: usize,
    /// Parameters, in the order in which their gradients are expected.
    pub slots: Vec<Slot>,
}

impl Bucket {
    /// Length in elements, with padding, which is reduced, too.
    pub fn elems(&self) -> usize {
        self.bytes / self.dtype.size()
    }
}

/// The buckets of a reducer: which parameters each one has, and where their slots lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    buckets: Vec<Bucket>,
    /// For each parameter, its bucket and its position in it.
    places: Vec<(usize, usize)>,
    /// Bytes of all buckets with padding.
    bucket_bytes: usize,
    /// Bytes of the largest bucket, with padding.
    spare_bytes: usize,
    /// Number of sets of slots.
    copies: usize,
}

impl BucketPlan {
    /// Creates the plan for gradients that are expected in `order`, a permutation of the parameters' indices.
    ///
    /// # Panics
    /// If `order` is not a permutation.
    pub fn new(params: &[ParamSpec], order: &[usize], options: &ReducerOptions) -> Self {
        let mut planned = vec![false; params.len()];
        for &param in order {
            assert!(!std::mem::replace(&mut planned[param], true), "order holds each parameter once");
        }
        assert_eq!(order.len(), params.len(), "order holds every parameter");

        // The bucket of an element type stays open while parameters of other types follow, so that a model whose
        // layers mix types does not get one bucket for each parameter. Buckets are numbered in the order in which
        // their last gradient is expected, which is the order in which they become full.
        struct OpenBucket {
            dtype: DType,
            delayed: bool,
            params: Vec<usize>,
            bytes: usize,
        }
        let mut open: Vec<OpenBucket> = Vec::new();
        let mut full: Vec<OpenBucket> = Vec::new();
        let align = |dtype: DType| if options.reduction == BucketReduction::ByCaller { dtype.size() } else { ALIGN };
        let tail = if options.on_device { first_of_the_last(params, order) } else { order.len() };
        for (place, &param) in order.iter().enumerate() {
            let ParamSpec { dtype, delayed, .. } = params[param];
            let bytes = params[param].bytes().next_multiple_of(align(dtype));
            let cap = options.cap_of(full.len());
            let mut at = open.iter().position(|bucket| bucket.dtype == dtype && bucket.delayed == delayed);
            let is_full = |bucket: &OpenBucket| match options.on_device {
                // The last bucket of a device (PLAN-8).
                true => bucket.bytes >= cap || (place == tail && bucket.bytes >= LAST_BUCKET_BYTES),
                false => bucket.bytes + bytes > cap,
            };
            if let Some(index) = at.filter(|&index| is_full(&open[index])) {
                full.push(open.remove(index));
                at = None;
            }
            match at {
                Some(index) => {
                    // Moved to the end: `open` stays sorted by the latest parameter.
                    let mut bucket = open.remove(index);
                    bucket.params.push(param);
                    bucket.bytes += bytes;
                    open.push(bucket);
                }
                None => open.push(OpenBucket { dtype, delayed, params: vec![param], bytes }),
            }
        }
        full.append(&mut open);
        let position = {
            let mut position = vec![0; params.len()];
            for (at, &param) in order.iter().enumerate() {
                position[param] = at;
            }
            position
        };
        full.sort_by_key(|bucket| (bucket.delayed, bucket.params.last().map(|&param| position[param])));

        let mut plan = Self {
            buckets: Vec::new(),
            places: vec![(0, 0); params.len()],
            bucket_bytes: 0,
            spare_bytes: 0,
            copies: if options.gives_buckets() { 1 } else { MAX_COPIES },
        };
        for (index, OpenBucket { dtype, params: members, .. }) in full.into_iter().enumerate() {
            let start = plan.bucket_bytes;
            let mut end = start;
            let mut slots = Vec::with_capacity(members.len());
            for (position, param) in members.into_iter().enumerate() {
                let in_place = options.reduces_in_place(&params[param]);
                let bytes = if in_place { 0 } else { params[param].bytes() };
                let slot = Slot { param, offset_bytes: end.next_multiple_of(align(dtype)), bytes, in_place };
                end = slot.offset_bytes + slot.bytes;
                slots.push(slot);
                plan.places[param] = (index, position);
            }
            plan.buckets.push(Bucket { dtype, offset_bytes: start, bytes: end - start, slots });
            plan.bucket_bytes = end.next_multiple_of(ALIGN);
            plan.spare_bytes = plan.spare_bytes.max(plan.bucket_bytes - start);
        }
        plan
    }

    /// The plan before the first step: gradients are expected in the reverse order of registration.
    pub fn initial(params: &[ParamSpec], options: &ReducerOptions) -> Self {
        let order: Vec<usize> = (0..params.len()).rev().collect();
        Self::new(params, &order, options)
    }

    /// Buckets, in the order in which they are reduced.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Number of parameters.
    pub fn num_params(&self) -> usize {
        self.places.len()
    }

    /// The bucket of a parameter.
    pub fn bucket_of(&self, param: usize) -> usize {
        self.places[param].0
    }

    /// The slot of a parameter.
    pub fn slot(&self, param: usize) -> Slot {
        let (bucket, position) = self.places[param];
        self.buckets[bucket].slots[position]
    }

    /// Number of slots of each parameter (PLAN-7).
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// Distance in bytes from a parameter's slot to its next one.
    pub fn copy_bytes(&self) -> usize {
        self.bucket_bytes
    }

    /// Start of the spare range, which has the size of the largest bucket.
    pub fn spare_offset_bytes(&self) -> usize {
        self.bucket_bytes * self.copies
    }

    /// Bytes of the window for the buckets and the spare range.
    pub fn window_bytes(&self) -> usize {
        self.spare_offset_bytes() + self.spare_bytes
    }
}

/// On a device, the position in `order` of the last bucket's first parameter (PLAN-8).
fn first_of_the_last(params: &[ParamSpec], order: &[usize]) -> usize {
    let last = order.iter().rposition(|&param| !params[param].delayed && params[param].elems() > 0);
    let Some(mut first) = last else { return order.len() };
    let mut bytes = params[order[first]].bytes();
    while first > 0 && bytes + params[order[first - 1]].bytes() <= LAST_BUCKET_BYTES {
        first -= 1;
        bytes += params[order[first]].bytes();
    }
    first
}

/// One line a bucket, for logs and golden files: `bucket 0: float32, 1.2 MiB: fc.bias, fc.weight`.
pub fn describe(plan: &BucketPlan, params: &[ParamSpec]) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    for (index, bucket) in plan.buckets().iter().enumerate() {
        let names: Vec<&str> = bucket.slots.iter().map(|slot| params[slot.param].name.as_str()).collect();
        let bytes: usize =
            bucket.slots.iter().filter(|slot| slot.in_place).map(|slot| params[slot.param].bytes()).sum();
        let _ =
            writeln!(text, "bucket {index}: {}, {} bytes: {}", bucket.dtype, bucket.bytes + bytes, names.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn param(name: &str, shape: &[u64], dtype: DType) -> ParamSpec {
        ParamSpec::dense(name, shape, dtype)
    }

    fn options(bucket_bytes: usize, first_bucket_bytes: usize) -> ReducerOptions {
        ReducerOptions { bucket_bytes: vec![first_bucket_bytes, bucket_bytes], ..ReducerOptions::default() }
    }

    #[test]
    fn a_small_first_bucket_then_full_ones_in_reverse_order() {
        let params = [
            param("conv.weight", &[512, 512, 3, 3], DType::Float32),
            param("conv.bias", &[512], DType::Float32),
            param("fc.weight", &[1000, 512], DType::Float32),
            param("fc.bias", &[1000], DType::Float32),
        ];
        let plan = BucketPlan::initial(&params, &options(8 << 20, 1 << 20));
        assert_eq!(
            describe(&plan, &params),
            "bucket 0: float32, 4000 bytes: fc.bias\n\
             bucket 1: float32, 2050048 bytes: fc.weight, conv.bias\n\
             bucket 2: float32, 9437184 bytes: conv.weight\n"
        );
    }

    #[test]
    fn on_a_device_the_last_bucket_holds_the_last_gradients_alone() {
        let plan = |last: &[u64]| {
            let params: Vec<ParamSpec> = [&[5, 1 << 18][..], &[1 << 20], &[1 << 20], &[1000]]
                .into_iter()
                .chain([last])
                .enumerate()
                .map(|(i, shape)| param(&format!("p{i}"), shape, DType::Float32))
                .collect();
            let order: Vec<usize> = (0..params.len()).collect();
            let options = ReducerOptions { on_device: true, ..options(100 << 20, 1 << 20) };
            describe(&BucketPlan::new(&params, &order, &options), &params)
        };
        assert_eq!(
            plan(&[1 << 22]),
            "bucket 0: float32, 5242880 bytes: p0\n\
             bucket 1: float32, 8392608 bytes: p1, p2, p3\n\
             bucket 2: float32, 16777216 bytes: p4\n"
        );
        assert_eq!(
            plan(&[1000]),
            "bucket 0: float32, 5242880 bytes: p0\n\
             bucket 1: float32, 8388608 bytes: p1, p2\n\
             bucket 2: float32, 8032 bytes: p3, p4\n"
        );
    }

    #[test]
    fn every_bucket_may_have_a_size_of_its_own() {
        let params: Vec<ParamSpec> = (0..6).map(|i| param(&format!("p{i}"), &[16], DType::Float32)).collect();
        let options = ReducerOptions { bucket_bytes: vec![64, 192, 128], ..ReducerOptions::default() };
        assert_eq!(
            describe(&BucketPlan::initial(&params, &options), &params),
            "bucket 0: float32, 64 bytes: p5\n\
             bucket 1: float32, 192 bytes: p4, p3, p2\n\
             bucket 2: float32, 128 bytes: p1, p0\n"
        );
    }

    #[test]
    fn types_that_alternate_share_buckets_by_type() {
        let params: Vec<ParamSpec> = (0..6)
            .map(|i| param(&format!("p{i}"), &[10], if i % 2 == 0 { DType::Float32 } else { DType::Float16 }))
            .collect();
        let plan = BucketPlan::initial(&params, &ReducerOptions::default());
        assert_eq!(
            describe(&plan, &params),
            "bucket 0: float16, 148 bytes: p5, p3, p1\nbucket 1: float32, 168 bytes: p4, p2, p0\n"
        );
    }

    #[test]
    fn no_parameters_make_no_buckets() {
        let plan = BucketPlan::initial(&[], &ReducerOptions::default());
        assert!(plan.buckets().is_empty());
        assert_eq!(plan.window_bytes(), 0);
    }

    fn any_params() -> impl Strategy<Value = Vec<ParamSpec>> {
        let dtype = prop::sample::select(vec![DType::Float32, DType::Float64, DType::BFloat16, DType::Complex64]);
        prop::collection::vec((prop::collection::vec(0u64..40, 0..4), dtype), 0..60).prop_map(|params| {
            params
                .into_iter()
                .enumerate()
                .map(|(i, (shape, dtype))| ParamSpec::dense(format!("p{i}"), shape, dtype))
                .collect()
        })
    }

    proptest! {
        #[test]
        fn plan_invariants(params in any_params(), cap in 1usize..300_000, first in 1usize..3_000, seed: u64) {
            let mut order: Vec<usize> = (0..params.len()).collect();
            // A shuffle from the seed; its quality does not matter.
            let mut state = seed | 1;
            for at in (1..order.len()).rev() {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                order.swap(at, (state >> 33) as usize % (at + 1));
            }
            let options = options(cap, first);
            let plan = BucketPlan::new(&params, &order, &options);
            prop_assert_eq!(&plan, &BucketPlan::new(&params, &order, &options), "PLAN-5");

            let mut seen = vec![false; params.len()];
            let mut end = 0;
            let mut last_filled = None;
            for (index, bucket) in plan.buckets().iter().enumerate() {
                prop_assert!(bucket.offset_bytes >= end && bucket.offset_bytes % ALIGN == 0);
                prop_assert!(bucket.slots.len() == 1 || bucket.bytes <= cap.max(first), "PLAN-3");
                prop_assert_eq!(bucket.bytes % bucket.dtype.size(), 0);
                end = bucket.offset_bytes;
                for slot in &bucket.slots {
                    prop_assert!(slot.offset_bytes >= end && slot.offset_bytes % ALIGN == 0, "PLAN-1");
                    prop_assert!(!std::mem::replace(&mut seen[slot.param], true), "PLAN-1");
                    prop_assert_eq!(params[slot.param].dtype, bucket.dtype, "PLAN-2");
                    prop_assert_eq!(slot.bytes, params[slot.param].bytes());
                    prop_assert_eq!(plan.slot(slot.param), *slot);
                    prop_assert_eq!(plan.bucket_of(slot.param), index);
                    end = slot.offset_bytes + slot.bytes;
                }
                prop_assert_eq!(end, bucket.offset_bytes + bucket.bytes);
                let positions: Vec<usize> = bucket.slots.iter()
                    .map(|slot| order.iter().position(|&param| param == slot.param).unwrap()).collect();
                prop_assert!(positions.is_sorted(), "PLAN-2");
                prop_assert!(last_filled < positions.last().copied(), "buckets fill in plan order");
                last_filled = positions.last().copied();
                prop_assert!(plan.spare_offset_bytes() + bucket.bytes <= plan.window_bytes());
            }
            prop_assert!(end <= plan.spare_offset_bytes());
            prop_assert!(seen.iter().all(|&seen| seen), "PLAN-1");
        }
    }
}
