//! The gradients of the first backward of a static graph, which all later ones repeat.
//!
//! A gradient may arrive in several parts: re-entrant checkpointing runs a backward for every checkpoint, and each of
//! them accumulates into the parameters that it uses. Only the last part completes the gradient. The first backward
//! counts the parts, so its gradients are reduced at its end; later backwards reduce each gradient when it is
//! complete.
//!
//! A value without threads or tensor memory.

/// The number of parts in which each parameter's gradient arrives in a static graph, learned from the first backward.
#[derive(Clone, Debug)]
pub struct History {
    /// Number of parts in this backward so far, by parameter.
    parts: Vec<u32>,
    /// Parameters in the order in which their last parts arrived in this backward; used only in the first one.
    order: Vec<usize>,
    /// Number of parts in the first backward.
    learned: Option<Vec<u32>>,
}

/// The meaning of a part of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientPart {
    /// The gradient is complete.
    Last,
    /// More parts follow, or their number is not known yet.
    NotLast,
    /// There are more parts than in the first backward, which had this many.
    TooMany(u32),
}

impl History {
    /// The state before the first backward.
    pub fn new(num_params: usize) -> Self {
        Self { parts: vec![0; num_params], order: Vec::new(), learned: None }
    }

    /// Begins a backward.
    pub fn start(&mut self) {
        self.parts.fill(0);
        self.order.clear();
    }

    /// Notes a part of the gradient of `param`.
    pub fn accumulated(&mut self, param: usize) -> GradientPart {
        self.parts[param] += 1;
        let Some(learned) = &self.learned else {
            self.order.push(param);
            return GradientPart::NotLast;
        };
        match self.parts[param].cmp(&learned[param]) {
            std::cmp::Ordering::Less => GradientPart::NotLast,
            std::cmp::Ordering::Equal => GradientPart::Last,
            std::cmp::Ordering::Greater => GradientPart::TooMany(learned[param]),
        }
    }

    /// Whether a part of the gradient of `param` has arrived in this backward.
    pub fn has_gradient(&self, param: usize) -> bool {
        self.parts[param] > 0
    }

    /// Whether any gradient has arrived in this backward.
    pub fn is_begun(&self) -> bool {
        self.parts.iter().any(|&parts| parts > 0)
    }

    /// Whether the first backward has ended.
    pub fn is_learned(&self) -> bool {
        self.learned.is_some()
    }

    /// The parameters among `params` whose gradients have fewer parts than in the first backward.
    pub fn incomplete(&self, params: &[usize]) -> Vec<usize> {
        let learned = self.learned.as_deref().unwrap_or_default();
        params
            .iter()
            .copied()
            .filter(|&param| learned.get(param).is_some_and(|&parts| parts > self.parts[param]))
            .collect()
    }

    /// All parameters: first those with a gradient, in the order in which they became complete, then the others.
    pub fn order(&self) -> Vec<usize> {
        let mut order = Vec::with_capacity(self.parts.len());
        let mut seen = vec![false; self.parts.len()];
        for &param in self.order.iter().rev() {
            if !std::mem::replace(&mut seen[param], true) {
                order.push(param);
            }
        }
        order.reverse();
        order.extend((0..self.parts.len()).filter(|&param| !seen[param]));
        order
    }

    /// Ends the first backward, which later ones repeat.
    pub fn learn(&mut self) {
        self.learned = Some(self.parts.clone());
        self.order = Vec::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_backward_teaches_which_part_is_the_last() {
        let mut history = History::new(4);
        history.start();
        for param in [2, 0, 2, 1] {
            assert_eq!(history.accumulated(param), GradientPart::NotLast);
        }
        assert!(!history.is_learned());
        assert_eq!(history.order(), [0, 2, 1, 3]);
        history.learn();

        history.start();
        assert_eq!(history.accumulated(2), GradientPart::NotLast);
        assert_eq!(history.accumulated(0), GradientPart::Last);
        assert_eq!(history.incomplete(&[1, 2, 3]), [1, 2]);
        assert_eq!(history.accumulated(2), GradientPart::Last);
        assert_eq!(history.accumulated(2), GradientPart::TooMany(2));
        assert_eq!(history.accumulated(3), GradientPart::TooMany(0));
        assert!(history.has_gradient(2) && !history.has_gradient(1));
    }

    #[test]
    fn a_first_backward_that_failed_teaches_nothing() {
        let mut history = History::new(2);
        history.start();
        history.accumulated(0);
        history.start();
        assert_eq!(history.accumulated(1), GradientPart::NotLast);
        assert_eq!(history.order(), [1, 0]);
    }
}
