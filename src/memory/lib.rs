//! Memory of this process: the emergency reserve for sheds, and the return of free heap.

pub mod emergency;
pub mod heap;
