//! The response cache: names that were agreed on before get a position, so that one bit means "ready for that name
//! again".
//!
//! - NCH-1: the cache changes only by answers, which all members receive in the same order, so it is equal on all
//!   members.

use std::collections::HashMap;
use std::sync::Arc;

use super::bits::BitSet;
use super::description::Description;

#[derive(Debug)]
pub(super) struct CacheSlot {
    pub(super) name: Arc<str>,
    pub(super) description: Arc<Description>,
    used: u64,
}

/// The response cache: descriptions that all members have agreed on before, by position.
#[derive(Debug, Default)]
pub(super) struct Cache {
    capacity: usize,
    slots: Vec<CacheSlot>,
    positions: HashMap<Arc<str>, usize>,
    clock: u64,
}

/// Names that were evicted.
#[derive(Debug)]
pub(super) struct Evicted {
    pub(super) position: usize,
    pub(super) name: Arc<str>,
    pub(super) description: Arc<Description>,
}

impl Cache {
    /// Sets the capacity, while the cache is empty.
    pub(super) fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity;
    }

    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.positions.get(name).copied()
    }

    pub(super) fn slot(&self, position: usize) -> Option<&CacheSlot> {
        self.slots.get(position)
    }

    /// Marks these positions as used, in the order of positions.
    pub(super) fn touch(&mut self, positions: &BitSet) {
        for position in positions.iter() {
            self.clock += 1;
            if let Some(slot) = self.slots.get_mut(position) {
                slot.used = self.clock;
            }
        }
    }

    /// Stores a name with its newest description, if the capacity is not 0; evicts the least recently used name if
    /// necessary.
    pub(super) fn insert(&mut self, name: &Arc<str>, description: Arc<Description>) -> Option<Evicted> {
        self.clock += 1;
        let used = self.clock;
        if let Some(position) = self.position(name) {
            self.slots[position].description = description;
            self.slots[position].used = used;
            return None;
        }
        let slot = CacheSlot { name: name.clone(), description, used };
        if self.slots.len() < self.capacity {
            self.positions.insert(name.clone(), self.slots.len());
            self.slots.push(slot);
            return None;
        }
        let (position, _) = self.slots.iter().enumerate().min_by_key(|(_, slot)| slot.used)?;
        let old = std::mem::replace(&mut self.slots[position], slot);
        self.positions.remove(&old.name);
        self.positions.insert(name.clone(), position);
        Some(Evicted { position, name: old.name, description: old.description })
    }
}
