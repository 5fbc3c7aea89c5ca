//! The gate that holds a step's reductions until the ranks have voted on them (RED-8).
//!
//! ```text
//! vote open: Held(jobs) --all ranks reduce by plan--> Open: the jobs are queued in their order, later ones at once
//!                       --anything else-------------> Refused: the jobs are dropped, and so are later ones
//! ```
//!
//! Jobs are reductions on a device, which cannot be withdrawn once they are queued there. The gate is part of the
//! step's state, under one lock with the step's number: the result of an earlier vote cannot open a later gate, and a
//! result that comes before the first job counts for it.

/// The gate of one step, and the jobs that wait before it.
#[derive(Debug)]
pub(super) enum VoteGate<Job> {
    /// There is no vote, or it allows the plan.
    Open,
    /// The vote is open.
    Held(Vec<Job>),
    /// The round does not take place as planned.
    Refused,
}

/// The gate's decision on a job.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission<Job> {
    /// The caller queues the job.
    Granted(Job),
    /// The gate keeps the job until the result.
    Held,
    /// The job is dropped.
    Refused(Job),
}

impl<Job> VoteGate<Job> {
    /// A gate that is open, or that a vote holds.
    pub(super) fn new(held: bool) -> Self {
        if held { Self::Held(Vec::new()) } else { Self::Open }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self, Self::Held(_))
    }

    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Self::Refused)
    }

    /// Decides on a job. Jobs come in plan order.
    pub(super) fn admit(&mut self, job: Job) -> Admission<Job> {
        match self {
            Self::Open => Admission::Granted(job),
            Self::Held(jobs) => {
                jobs.push(job);
                Admission::Held
            }
            Self::Refused => Admission::Refused(job),
        }
    }

    /// Opens a held gate; returns the jobs, which the caller carries out before later ones.
    pub(super) fn open(&mut self) -> Vec<Job> {
        self.decide(Self::Open)
    }

    /// Refuses the jobs of a held gate, and returns them.
    pub(super) fn refuse(&mut self) -> Vec<Job> {
        self.decide(Self::Refused)
    }

    /// Takes the jobs whose memory is about to go, without a decision.
    pub(super) fn withdraw(&mut self) -> Vec<Job> {
        if let Self::Held(jobs) = self { std::mem::take(jobs) } else { Vec::new() }
    }

    fn decide(&mut self, decided: Self) -> Vec<Job> {
        let jobs = self.withdraw();
        if self.is_held() {
            *self = decided;
        }
        jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_gate_grants_at_once() {
        let mut gate = VoteGate::new(false);
        assert!(gate.is_open());
        assert_eq!(gate.admit(1), Admission::Granted(1));
        assert!(gate.refuse().is_empty(), "there is no vote that could refuse");
        assert!(gate.is_open());
    }

    #[test]
    fn a_held_gate_keeps_jobs_in_order_until_it_opens() {
        let mut gate = VoteGate::new(true);
        assert_eq!((gate.admit(1), gate.admit(2)), (Admission::Held, Admission::Held));
        assert_eq!(gate.open(), [1, 2]);
        assert_eq!(gate.admit(3), Admission::Granted(3));
        assert!(gate.open().is_empty(), "a second result changes nothing");
        assert!(gate.refuse().is_empty());
        assert!(gate.is_open());
    }

    #[test]
    fn a_result_before_the_first_job_counts() {
        let (mut allowed, mut refused) = (VoteGate::new(true), VoteGate::new(true));
        assert!(allowed.open().is_empty() && refused.refuse().is_empty());
        assert_eq!(allowed.admit(1), Admission::Granted(1));
        assert_eq!(refused.admit(1), Admission::Refused(1));
    }

    #[test]
    fn a_refused_gate_returns_its_jobs_and_stays_shut() {
        let mut gate = VoteGate::new(true);
        assert_eq!(gate.admit(1), Admission::Held);
        assert_eq!(gate.refuse(), [1]);
        assert!(gate.open().is_empty());
        assert!(gate.is_refused());
        assert_eq!(gate.admit(2), Admission::Refused(2));
    }

    #[test]
    fn withdrawn_jobs_are_not_carried_out_by_a_later_result() {
        let mut gate = VoteGate::new(true);
        assert_eq!(gate.admit(1), Admission::Held);
        assert_eq!(gate.withdraw(), [1]);
        assert!(gate.is_held());
        assert!(gate.open().is_empty());
    }
}
