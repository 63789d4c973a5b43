//! Interruptions of a pass: commands that it takes between two products, and what it means when it breaks off.

use super::{Model, forward::Run, products::Failure, weights::Place};
use crate::{
    engine::{
        error::{ForwardError, ReadError},
        preemption::Preempt,
        reader::Missing,
    },
    units::Bytes,
};

impl Model {
    /// Does what a look says, at a point where no weight is in use. `place` is what will be computed next.
    pub(super) fn preempt(&mut self, found: Preempt, place: Place, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        match found {
            Preempt::No => Ok(()),
            Preempt::Pause => {
                if let Some(plan) = run.preemption.take() {
                    let Run { needed, preemption, .. } = run;
                    let result = self.change(&plan, place, needed, false, &mut || preemption.wanted());
                    run.preemption.applied(result);
                }
                Ok(())
            }
            Preempt::Stop => Err(Failure::Stopped),
        }
    }

    /// What it means for the pass that layer `layer`, or the head behind the last one, could not be computed.
    pub(super) fn failed(&self, failure: Failure, layer: usize) -> ForwardError {
        match failure {
            Failure::Stopped | Failure::Missing(Missing::Stopped, _) => self.cancelled(layer),
            Failure::Missing(Missing::Stalled(waited), what) => {
                ForwardError::Stalled { what: what.to_string(), waited }
            }
            Failure::Missing(Missing::Failed(error), _) => ForwardError::Read(error),
            Failure::Device(error) => error.into(),
            Failure::NoMatrix => ForwardError::Read(ReadError {
                path: self.header.path().to_owned(),
                what: format!("layer {layer}"),
                offset: 0,
                bytes: Bytes::ZERO,
                problem: "its reader is not running".to_owned(),
                replaced: false,
            }),
        }
    }

    fn cancelled(&self, layer: usize) -> ForwardError {
        ForwardError::Cancelled { position: self.position, layer: u32::try_from(layer).unwrap_or(u32::MAX) }
    }
}
