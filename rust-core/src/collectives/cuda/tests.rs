use super::*;
use crate::buffer::{DType, ReduceOp, TensorView};

fn view(device: Device) -> TensorView {
    // SAFETY: no code reads or writes through it.
    unsafe { TensorView::new(64 as *mut u8, 3, DType::Float32, device, 7) }.unwrap()
}

#[test]
fn a_request_in_another_stream_is_otherwise_the_same() {
    let gpu = || view(Device::Cuda(1));
    let (inputs, outputs) = (vec![gpu(), gpu()], vec![gpu(), gpu()]);
    let (data, op, root) = (gpu(), ReduceOp::Max, 1);
    for request in [
        Request::AllReduce { input: data, output: data, op },
        Request::Reduce { input: data, output: data, op, root },
        Request::Broadcast { data, root },
        Request::AllGather { input: data, outputs: outputs.clone() },
        Request::Gather { input: data, outputs: outputs.clone(), root },
        Request::Scatter { inputs: inputs.clone(), output: data, root },
        Request::ReduceScatter { inputs: inputs.clone(), output: data, op },
        Request::AllToAll { inputs, outputs },
    ] {
        let moved = call::on_stream(&request, 9);
        assert!(call::views(&moved).iter().all(|view| view.stream() == 9 && view.ptr() == data.ptr()), "{moved:?}");
        assert_eq!(call::views(&moved).len(), call::views(&request).len());
    }
}

#[test]
fn views_agree_about_their_place() {
    let send = |device| Request::Send { data: view(device), to: 0, tag: 0 };
    assert_eq!(place(&[send(Device::Cuda(2)), send(Device::Cuda(2))]).unwrap(), (2, 7));
    let text = place(&[send(Device::Cuda(2)), send(Device::Cuda(0))]).unwrap_err().to_string();
    assert_eq!(text, "tensors on `cuda:2` and `cuda:0` are mixed");
    assert!(place(&[send(Device::Cuda(2)), send(Device::Cpu)]).is_err());
    let (input, output) = (view(Device::Cuda(1)), view(Device::Cuda(1)));
    let reduce = Request::AllReduce { input, output, op: ReduceOp::Sum };
    assert!(is_on_device(&reduce) && !is_on_device(&Request::Barrier));
}

#[test]
fn every_stream_of_a_batch_is_found_once() {
    // SAFETY: no code reads or writes through it.
    let on = |stream, device| unsafe {
        TensorView::new(64 as *mut u8, 3, DType::Float32, Device::Cuda(device), stream).unwrap()
    };
    let sum = |input, output| Request::AllReduce { input, output, op: ReduceOp::Sum };
    let requests = [sum(on(7, 1), on(7, 1)), sum(on(9, 1), on(9, 1)), sum(on(7, 1), on(9, 1)), sum(on(8, 0), on(8, 0))];
    assert_eq!(streams(&requests, 1), [7, 9]);
}
