//! The window that gradients live in, and who uses which slot of it (RED-3).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Plan;
use crate::collectives::Window;

/// A window laid out by a plan. A slot is free or leased to one tensor.
#[derive(Debug)]
pub struct Arena {
    window: Arc<Window>,
    /// By parameter.
    slots: Vec<ArenaSlot>,
}

#[derive(Debug)]
struct ArenaSlot {
    offset_bytes: usize,
    bytes: usize,
    leased: AtomicBool,
}

impl Arena {
    /// Lays `window` out by `plan`.
    ///
    /// # Panics
    /// If the window is smaller than the plan needs.
    pub fn new(window: Arc<Window>, plan: &Plan) -> Arc<Self> {
        assert!(window.bytes() >= plan.window_bytes(), "the window was made for the plan");
        let slots = (0..plan.num_params())
            .map(|param| {
                let slot = plan.slot(param);
                ArenaSlot { offset_bytes: slot.offset_bytes, bytes: slot.bytes, leased: AtomicBool::new(false) }
            })
            .collect();
        Arc::new(Self { window, slots })
    }

    /// The memory.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// Start of a parameter's slot.
    pub fn slot_ptr(&self, param: usize) -> *mut u8 {
        // SAFETY: the plan keeps slots inside the window (PLAN-1), whose size was checked.
        unsafe { self.window.local().add(self.slots[param].offset_bytes) }
    }

    /// Start of the bytes at `offset_bytes`.
    ///
    /// # Panics
    /// If the offset lies outside the window.
    pub fn at(&self, offset_bytes: usize) -> *mut u8 {
        assert!(offset_bytes <= self.window.bytes(), "offsets come from the window's plan");
        // SAFETY: the assertion.
        unsafe { self.window.local().add(offset_bytes) }
    }

    /// Leases the slot of `param`, if it is free.
    pub fn lease(self: &Arc<Self>, param: usize) -> Option<SlotLease> {
        let slot = &self.slots[param];
        // Acquire: what the last holder did to the bytes is visible.
        slot.leased
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| SlotLease { arena: Arc::clone(self), param })
    }
}

/// The right to use a slot; given back when dropped. Keeps the memory alive.
#[derive(Debug)]
pub struct SlotLease {
    arena: Arc<Arena>,
    param: usize,
}

impl SlotLease {
    /// First byte.
    pub fn ptr(&self) -> *mut u8 {
        self.arena.slot_ptr(self.param)
    }

    /// Length.
    pub fn bytes(&self) -> usize {
        self.arena.slots[self.param].bytes
    }

    /// Fills the slot with the bytes at `from`.
    ///
    /// # Safety
    /// As many bytes as the slot has are readable at `from`, and do not overlap it.
    pub unsafe fn fill(&mut self, from: *const u8) {
        // SAFETY: the caller's promise; the lease is the only user of the slot (RED-3), which lies inside the window.
        unsafe { super::copy::copy(self.ptr(), from, self.bytes()) }
    }

    /// Fills the slot with zeros.
    pub fn zero(&mut self) {
        // SAFETY: the lease is the only user of the slot (RED-3), and the slot lies inside the window.
        unsafe { std::ptr::write_bytes(self.ptr(), 0, self.bytes()) }
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        // Release: the next holder sees what this one wrote.
        self.arena.slots[self.param].leased.store(false, Ordering::Release);
    }
}
