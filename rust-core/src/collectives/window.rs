//! Memory that every member of a group contributes. On one host each member sees all parts, and a reduction over
//! [`super::Request::AllReduceWindow`] reads its peers' values where they lie and writes the result where it belongs.

/// One allocation per member, of equal size, zeroed.
#[derive(Debug)]
pub struct Window {}

impl Window {
    /// This member's part.
    pub fn local(&self) -> *mut u8 {
        todo!()
    }

    /// Bytes of each part.
    pub fn bytes(&self) -> usize {
        todo!()
    }

    /// Member `rank`'s part where it is visible.
    pub fn peer(&self, rank: usize) -> Option<*mut u8> {
        let _ = rank;
        todo!()
    }
}
