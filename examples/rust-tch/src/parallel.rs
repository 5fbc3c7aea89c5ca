//! Data parallelism for a `tch` program: broadcast of the parameters, and reduction of the gradients.

use std::sync::Arc;

use smd_core::buffer::{DType, Device, ReduceOp, TensorView};
use smd_core::collectives::{Communicator, Request};
use smd_core::reducer::{ReducerOptions, ParamSpec, Reducer};
use smd_core::session::Session;
use tch::nn::VarStore;
use tch::{Kind, Tensor};

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The parameters of a model that is replicated on all ranks.
pub struct Parallel {
    world: Arc<Communicator>,
    reducer: Arc<Reducer>,
    names: Vec<String>,
    parameters: Vec<Tensor>,
}

impl Parallel {
    /// Gives all ranks the parameters of rank 0, and plans the reduction of their gradients.
    pub fn new(session: &Session, variables: &VarStore) -> Result<Self> {
        // A `VarStore` has no order, and all ranks need the same order.
        let mut named: Vec<(String, Tensor)> =
            variables.variables().into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let (names, parameters): (Vec<_>, Vec<_>) = named.into_iter().unzip();
        let mut specs = Vec::new();
        for (name, parameter) in names.iter().zip(&parameters) {
            let shape: Vec<u64> = parameter.size().into_iter().map(|length| length as u64).collect();
            specs.push(ParamSpec::dense(name, shape, view(parameter)?.dtype()));
        }
        let world = session.world();
        for parameter in &parameters {
            world.run(&Request::Broadcast { data: view(parameter)?, root: 0 })?;
        }
        // The reducer gets its own communicator, because no other operation may use it during a backward.
        let ranks: Vec<usize> = (0..session.size()).collect();
        let reducer = Reducer::new(session.new_group(&ranks)?, specs, ReducerOptions::default())?;
        Ok(Self { world, reducer, names, parameters })
    }

    /// Averages the gradient of each parameter over all ranks, after a backward. A bucket is reduced while later ones are
    /// filled.
    pub fn average_gradients(&self) -> Result<()> {
        self.reducer.begin(true)?;
        let marked = self.mark_all();
        if let Err(error) = &marked {
            // The step of the other ranks fails with this text.
            self.reducer.abandon(&error.to_string(), false);
        }
        marked?;
        self.reducer.finish()?;
        Ok(())
    }

    fn mark_all(&self) -> Result<()> {
        // Backward computes gradients in roughly this order, which the bucket plan expects.
        for (index, parameter) in self.parameters.iter().enumerate().rev() {
            let gradient = parameter.grad();
            if !gradient.defined() {
                return Err(format!("`{}` got no gradient", self.names[index]).into());
            }
            view(&gradient)?;
            // SAFETY: the gradient belongs to its parameter, which lives as long as `self`, and no other code accesses it before
            // `finish` or `abandon` has returned. It is contiguous, as `view` has checked.
            unsafe { self.reducer.mark_ready(index, gradient.data_ptr().cast(), true)? };
        }
        Ok(())
    }

    /// The average of `value` over all ranks.
    pub fn average(&self, value: &Tensor) -> Result<Tensor> {
        self.all_reduce(value, ReduceOp::Average)
    }

    /// Fails if a parameter differs between ranks in any bit.
    pub fn check_replicas(&self) -> Result<()> {
        for (name, parameter) in self.names.iter().zip(&self.parameters) {
            let bits = parameter.detach().view_dtype(Kind::Int);
            if self.all_reduce(&bits, ReduceOp::Min)? != self.all_reduce(&bits, ReduceOp::Max)? {
                return Err(format!("`{name}` differs between ranks").into());
            }
        }
        Ok(())
    }

    fn all_reduce(&self, value: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let result = value.copy();
        self.world.run(&Request::AllReduce { input: view(&result)?, output: view(&result)?, op })?;
        Ok(result)
    }
}

/// The tensor as the core sees it; for as long as the tensor lives.
fn view(tensor: &Tensor) -> smd_core::Result<TensorView> {
    let refuse = |why: String| Err(smd_core::Error::InvalidArgument(why));
    let dtype = match tensor.kind() {
        Kind::Float => DType::Float32,
        Kind::Double => DType::Float64,
        Kind::Int => DType::Int32,
        kind => return refuse(format!("this example knows no tensors of {kind:?}")),
    };
    if tensor.device() != tch::Device::Cpu || !tensor.is_contiguous() {
        return refuse(format!("a tensor of size {:?} is not contiguous in CPU memory", tensor.size()));
    }
    // SAFETY: the tensor holds that many elements. Callers keep it while an operation uses the view.
    unsafe { TensorView::new(tensor.data_ptr().cast(), tensor.numel(), dtype, Device::Cpu, 0) }
}
