//! Memory of this process: what is set aside for sheds, and what its heap gives back.

pub mod emergency;
pub mod heap;
