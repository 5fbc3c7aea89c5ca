//! Addresses that are no multiples of a vector, from which the kernels load element by element.

use std::sync::Once;

use super::VECTOR;
use crate::buffer::TensorView;
use crate::collectives::Request;
use crate::metrics::{self, Fallback};

/// Smaller tensors take little time in any case.
const LARGE_BYTES: usize = 1 << 20;

/// Counts a request with a large tensor at such an address, and warns once.
pub(super) fn note(request: &Request) {
    static WARNED: Once = Once::new();
    let Some(tensor) = unaligned(request) else { return };
    metrics::note_fallback(Fallback::UnalignedTensor);
    WARNED.call_once(|| {
        let (bytes, past) = (tensor.bytes(), tensor.ptr() as usize % VECTOR);
        tracing::warn!(
            "a collective's tensor of {bytes} bytes begins {past} bytes past a multiple of {VECTOR}, so GPUs load it \
             element by element, which takes longer: pass tensors that begin at the start of their memory or at a \
             multiple of {VECTOR} bytes; further ones are counted as `unaligned_tensor` in the metrics"
        );
    });
}

/// A large tensor of `request` at such an address.
fn unaligned(request: &Request) -> Option<&TensorView> {
    let (one, many): ([&TensorView; 2], &[TensorView]) = match request {
        Request::AllReduce { input, output, .. } | Request::Reduce { input, output, .. } => ([input, output], &[]),
        Request::ReduceScatter { inputs, output, .. } => ([output, output], inputs),
        Request::AllGather { input, outputs } => ([input, input], outputs),
        _ => return None,
    };
    one.into_iter()
        .chain(many)
        .find(|view| view.bytes() >= LARGE_BYTES && !(view.ptr() as usize).is_multiple_of(VECTOR))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{DType, Device, ReduceOp};

    fn view(address: usize, elems: usize) -> TensorView {
        // SAFETY: no code reads or writes through it.
        unsafe { TensorView::new(address as *mut u8, elems, DType::Float32, Device::Cuda(0), 0) }.unwrap()
    }

    fn all_reduce(address: usize, elems: usize) -> Request {
        let (input, output) = (view(address, elems), view(1 << 20, elems));
        Request::AllReduce { input, output, op: ReduceOp::Sum }
    }

    #[test]
    fn large_tensors_inside_of_a_vector_are_found() {
        let large = LARGE_BYTES / 4;
        assert!(unaligned(&all_reduce(1 << 20, large)).is_none());
        assert!(unaligned(&all_reduce((1 << 20) + 4, large)).is_some());
        assert!(unaligned(&all_reduce((1 << 20) + 4, large - 1)).is_none());
        let outputs = vec![view(1 << 20, large), view((1 << 20) + 8, large)];
        assert!(unaligned(&Request::AllGather { input: view(1 << 20, large), outputs }).is_some());
    }
}
