//! Compares the inputs of the plan between ranks, once, when a reducer is created (RED-1).
//!
//! Usually, ranks exchange 40 bytes each. Only if these differ, they exchange the descriptions themselves, so that
//! the error can name the parameter, two ranks and their values.

use sha2::{Digest, Sha256};

use super::{ParamSpec, ReducerOptions};
use crate::buffer::{DType, Device, TensorView};
use crate::collectives::{Communicator, Request};
use crate::error::{Error, Result};

/// The inputs from which a plan is derived.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ReducerDescription {
    /// Parameters in the order of registration.
    pub params: Vec<ParamSpec>,
    /// Options of the caller.
    pub options: ReducerOptions,
}

/// Compares `mine` with every other member's description. Collective.
///
/// # Errors
/// [`Error::Mismatch`] with the same text on every member; the errors of the communicator.
pub fn agree(communicator: &Communicator, mine: &ReducerDescription) -> Result<()> {
    let encoded = postcard::to_stdvec(mine)
        .map_err(|error| Error::Internal(format!("the parameter list cannot be encoded: {error}")))?;
    let mut digest = Sha256::digest(&encoded).to_vec();
    digest.extend((encoded.len() as u64).to_le_bytes());
    let size = communicator.members().size();
    let digests = gather(communicator, &mut digest, &vec![40; size])?;
    if digests.iter().all(|other| *other == digests[0]) {
        return Ok(());
    }

    let lengths: Vec<usize> = digests
        .iter()
        .map(|digest| u64::from_le_bytes(digest[32..].try_into().expect("a digest is 40 bytes")) as usize)
        .collect();
    let mut encoded = encoded;
    let descriptions = gather(communicator, &mut encoded, &lengths)?
        .iter()
        .map(|bytes| postcard::from_bytes(bytes))
        .collect::<Result<Vec<ReducerDescription>, _>>()
        .map_err(|error| Error::Internal(format!("a peer's parameter list cannot be decoded: {error}")))?;
    let ranks = &communicator.members().ranks;
    let detail = descriptions
        .iter()
        .zip(ranks.iter())
        .skip(1)
        .find_map(|(other, &rank)| difference(&descriptions[0], ranks[0], other, rank))
        .unwrap_or_else(|| "parameter lists with different digests look alike".to_owned());
    Err(Error::Mismatch { during: "construction of the gradient reducer".to_owned(), detail })
}

/// A digest of a description.
pub fn summary(description: &ReducerDescription) -> String {
    const NAMED: usize = 4;
    let more = |all: usize| if all > NAMED { format!(" and {} more", all - NAMED) } else { String::new() };
    let ReducerDescription { params, options } = description;
    let param = |param: &ParamSpec| format!("`{}` ({} {:?})", param.name, param.dtype, param.shape);
    let params = params.iter().take(NAMED).map(param).collect::<Vec<_>>().join(", ") + &more(params.len());
    let absent = options.absent.iter().take(NAMED).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let without = if absent.is_empty() { absent } else { format!(", none of {absent}{}", more(options.absent.len())) };
    // Equal values have equal encodings on all ranks.
    let digest = postcard::to_stdvec(description).map(Sha256::digest).unwrap_or_default();
    format!("the gradients of {params}{without} (plan {:02x}{:02x}{:02x})", digest[0], digest[1], digest[2])
}

/// Gathers every member's bytes; member i has `lengths[i]` of them.
fn gather(communicator: &Communicator, mine: &mut [u8], lengths: &[usize]) -> Result<Vec<Vec<u8>>> {
    let mut blocks: Vec<Vec<u8>> = lengths.iter().map(|&length| vec![0; length]).collect();
    let outputs = blocks.iter_mut().map(|block| view(block)).collect::<Result<Vec<_>>>()?;
    communicator.run(&Request::AllGather { input: view(mine)?, outputs })?;
    Ok(blocks)
}

pub(super) fn view(bytes: &mut [u8]) -> Result<TensorView> {
    // SAFETY: the callers keep the bytes alive and untouched while `Communicator::run`, which blocks, uses the view.
    unsafe { TensorView::new(bytes.as_mut_ptr(), bytes.len(), DType::UInt8, Device::Cpu, 0) }
}

/// Describes the first difference between two ranks; `None` if there is none.
pub fn difference(a: &ReducerDescription, rank_a: usize, b: &ReducerDescription, rank_b: usize) -> Option<String> {
    for (with, rank, without, other) in [(b, rank_b, a, rank_a), (a, rank_a, b, rank_b)] {
        let is_absent = |name: &&String| !with.options.absent.contains(name);
        if let Some(name) = without.options.absent.iter().find(is_absent) {
            return Some(format!("parameter `{name}` has a gradient on rank {rank} and none on rank {other}"));
        }
    }
    for (index, (x, y)) in a.params.iter().zip(&b.params).enumerate() {
        if x.name != y.name {
            return Some(format!(
                "parameter {index} is `{}` on rank {rank_a} and `{}` on rank {rank_b}; every rank must register the \
                 same parameters in the same order",
                x.name, y.name
            ));
        }
        if x.shape != y.shape {
            return Some(format!(
                "parameter `{}` has shape {:?} on rank {rank_a} and {:?} on rank {rank_b}",
                x.name, x.shape, y.shape
            ));
        }
        if x.dtype != y.dtype {
            return Some(format!(
                "parameter `{}` is {} on rank {rank_a} and {} on rank {rank_b}",
                x.name, x.dtype, y.dtype
            ));
        }
        let yes_no = |flag| if flag { "is" } else { "is not" };
        for (what, mine, other) in
            [("said to have sparse gradients", x.sparse, y.sparse), ("delayed", x.delayed, y.delayed)]
        {
            if mine != other {
                return Some(format!(
                    "parameter `{}` {} {what} on rank {rank_a} and {} on rank {rank_b}",
                    x.name,
                    yes_no(mine),
                    yes_no(other)
                ));
            }
        }
    }
    let common = a.params.len().min(b.params.len());
    if a.params.len() != b.params.len() {
        let (longer, rank) = if a.params.len() > b.params.len() { (a, rank_a) } else { (b, rank_b) };
        return Some(format!(
            "rank {rank_a} has {} parameters and rank {rank_b} has {}: `{}` is only on rank {rank}",
            a.params.len(),
            b.params.len(),
            longer.params[common].name
        ));
    }
    let (x, y) = (&a.options, &b.options);
    let differ = |name: &str, x: &dyn std::fmt::Display, y: &dyn std::fmt::Display| {
        Some(format!("`{name}` is {x} on rank {rank_a} and {y} on rank {rank_b}"))
    };
    if x.find_unused_parameters != y.find_unused_parameters {
        return differ("find_unused_parameters", &x.find_unused_parameters, &y.find_unused_parameters);
    }
    if x.on_device != y.on_device {
        let place = |on_device| if on_device { "on a CUDA device" } else { "on the CPU" };
        return Some(format!(
            "parameters are {} on rank {rank_a} and {} on rank {rank_b}",
            place(x.on_device),
            place(y.on_device)
        ));
    }
    if x.static_graph != y.static_graph {
        return differ("static_graph", &x.static_graph, &y.static_graph);
    }
    if x.reduction != y.reduction {
        return differ("reduction of a bucket", &x.reduction, &y.reduction);
    }
    if x.sum != y.sum {
        return differ("sum", &x.sum, &y.sum);
    }
    if x.accumulation_steps != y.accumulation_steps {
        return differ("gradient_accumulation_steps", &x.accumulation_steps, &y.accumulation_steps);
    }
    if x.bucket_bytes != y.bucket_bytes {
        let (x, y) = (format!("{:?}", x.bucket_bytes), format!("{:?}", y.bucket_bytes));
        return differ("list of bucket sizes in bytes", &x, &y);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reducer::BucketReduction;

    fn description(params: &[(&str, &[u64], DType)]) -> ReducerDescription {
        let params = params.iter().map(|(name, shape, dtype)| ParamSpec::dense(*name, *shape, *dtype)).collect();
        ReducerDescription { params, options: ReducerOptions::default() }
    }

    #[test]
    fn a_difference_is_named_with_both_ranks_and_both_values() {
        let base = description(&[("a", &[2, 3], DType::Float32), ("b", &[4], DType::Float32)]);
        let with = |change: &dyn Fn(&mut ReducerDescription)| {
            let mut other = base.clone();
            change(&mut other);
            difference(&base, 0, &other, 3).unwrap_or_default()
        };
        assert_eq!(with(&|_| ()), "");
        assert_eq!(
            with(&|d| d.params[0].shape = vec![3, 3]),
            "parameter `a` has shape [2, 3] on rank 0 and [3, 3] on rank 3"
        );
        assert_eq!(
            with(&|d| d.params[1].dtype = DType::BFloat16),
            "parameter `b` is float32 on rank 0 and bfloat16 on rank 3"
        );
        assert_eq!(with(&|d| d.params.truncate(1)), "rank 0 has 2 parameters and rank 3 has 1: `b` is only on rank 0");
        assert_eq!(
            with(&|d| d.params.swap(0, 1)),
            "parameter 0 is `a` on rank 0 and `b` on rank 3; every rank must register the same parameters in the \
             same order"
        );
        assert_eq!(
            with(&|d| d.options.find_unused_parameters = true),
            "`find_unused_parameters` is false on rank 0 and true on rank 3"
        );
        assert_eq!(
            with(&|d| d.params[1].sparse = true),
            "parameter `b` is not said to have sparse gradients on rank 0 and is on rank 3"
        );
        assert_eq!(
            with(&|d| d.options.reduction = BucketReduction::Compressed(DType::Float16)),
            "`reduction of a bucket` is the average on rank 0 and the average in float16 on rank 3"
        );
        assert_eq!(
            with(&|d| d.options.absent.push("b".to_owned())),
            "parameter `b` has a gradient on rank 0 and none on rank 3"
        );
        assert_eq!(
            with(&|d| d.options.bucket_bytes = vec![128]),
            "`list of bucket sizes in bytes` is [1048576, 26214400] on rank 0 and [128] on rank 3"
        );
    }
}
