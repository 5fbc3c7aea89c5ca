//! The window that holds gradients, and the leases of its slots (RED-3).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::BucketPlan;
use super::plan::MAX_COPIES;
use crate::collectives::Window;
use crate::collectives::result_stores::ResultStores;

/// A window that is divided into slots by a plan. A slot is free or leased to one tensor.
#[derive(Debug)]
pub struct Arena {
    window: Arc<Window>,
    /// The slots of each parameter.
    slots: Vec<ArenaSlot>,
    /// Offset of each parameter's first slot, and the distance between its slots.
    copies: usize,
    copy_bytes: usize,
    /// How gradients are written to their slots. A large one may be written past the cache; see the note "results".
    stores: ResultStores,
}

#[derive(Debug)]
struct ArenaSlot {
    offset_bytes: usize,
    bytes: usize,
    /// For each set of slots, whether this parameter's slot is leased (PLAN-7).
    leased: [AtomicBool; MAX_COPIES],
}

impl Arena {
    /// Lays `window` out by `plan`.
    ///
    /// # Panics
    /// If the window is smaller than the plan needs.
    pub fn new(window: Arc<Window>, plan: &BucketPlan) -> Arc<Self> {
        assert!(window.bytes() >= plan.window_bytes(), "the window was made for the plan");
        let slots = (0..plan.num_params())
            .map(|param| {
                let slot = plan.slot(param);
                ArenaSlot { offset_bytes: slot.offset_bytes, bytes: slot.bytes, leased: Default::default() }
            })
            .collect();
        Arc::new(Self {
            window,
            slots,
            copies: plan.copies(),
            copy_bytes: plan.copy_bytes(),
            stores: ResultStores::default(),
        })
    }

    /// The memory.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// Address of one of a parameter's slots.
    ///
    /// # Panics
    /// If the parameter has fewer slots.
    pub fn slot_ptr(&self, param: usize, copy: usize) -> *mut u8 {
        assert!(copy < self.copies, "a parameter has {} slots", self.copies);
        // SAFETY: the plan keeps slots inside the window (PLAN-1), whose size was checked.
        unsafe { self.window.local().add(self.slots[param].offset_bytes + copy * self.copy_bytes) }
    }

    /// The set of the parameter's slot that starts at `ptr`, if one does.
    pub fn copy_at(&self, param: usize, ptr: *const u8) -> Option<usize> {
        (0..self.copies).find(|&copy| self.slot_ptr(param, copy).cast_const() == ptr)
    }

    /// Address of the byte at `offset_bytes`.
    ///
    /// # Panics
    /// If the offset lies outside the window.
    pub fn at(&self, offset_bytes: usize) -> *mut u8 {
        assert!(offset_bytes <= self.window.bytes(), "offsets come from the window's plan");
        // SAFETY: the assertion.
        unsafe { self.window.local().add(offset_bytes) }
    }

    /// Leases a free slot of `param`, if there is one; the first set is preferred, so that the same memory is used in
    /// every step.
    pub fn lease(self: &Arc<Self>, param: usize) -> Option<SlotLease> {
        let leased = &self.slots[param].leased[..self.copies];
        // Acquire, so that the writes of the previous lease's holder are visible.
        let take = |flag: &AtomicBool| flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        leased.iter().position(take).map(|copy| SlotLease { arena: Arc::clone(self), param, copy })
    }
}

/// The right to use a slot, which is freed when the lease is dropped. Keeps the window's memory alive.
#[derive(Debug)]
pub struct SlotLease {
    arena: Arc<Arena>,
    param: usize,
    copy: usize,
}

impl SlotLease {
    /// Address of the slot.
    pub fn ptr(&self) -> *mut u8 {
        self.arena.slot_ptr(self.param, self.copy)
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.arena.slots[self.param].bytes
    }

    /// Copies the bytes at `from` to the slot.
    ///
    /// # Safety
    /// As many bytes as the slot has are readable at `from`, and do not overlap the slot.
    pub unsafe fn fill(&mut self, from: *const u8) {
        let (slot, bytes) = (self.ptr(), self.bytes());
        let writer = self.arena.stores.begin(None, bytes);
        // SAFETY: the caller's promise; the lease is the only user of the slot (RED-3), which lies inside the window.
        unsafe {
            writer.copy(from, slot, bytes);
            writer.finish_copy(slot, bytes);
        }
    }

    /// Fills the slot with zeros.
    pub fn zero(&mut self) {
        // SAFETY: the lease is the only user of the slot (RED-3), and the slot lies inside the window.
        unsafe { std::ptr::write_bytes(self.ptr(), 0, self.bytes()) }
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        // Release, so that the next holder sees the writes of this one.
        self.arena.slots[self.param].leased[self.copy].store(false, Ordering::Release);
    }
}
