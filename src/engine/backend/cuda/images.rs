//! Compiled kernels: machine code of two devices, and PTX for all others.

use std::{ffi::c_int, io::Read as _};

use flate2::read::GzDecoder;

use crate::error::Unavailable;

/// The kernels for a device of this compute capability, in the format of `cuModuleLoadData`, and their target.
pub(super) fn for_capability(
    capability: (c_int, c_int),
) -> Result<(Vec<u8>, &'static str), Unavailable> {
    let (packed, name) = match capability {
        (8, 7) => (SM_87, "sm_87"),
        (9, 0) => (SM_90, "sm_90"),
        (8.., _) => (COMPUTE_80, "PTX"),
        (major, minor) => {
            let reason =
                format!("the GPU has compute capability {major}.{minor}, at least 8.0 is needed");
            return Err(Unavailable::new(reason, "set `llm.device: cpu`"));
        }
    };
    let image = unpacked(packed).map_err(|problem| {
        Unavailable::new(
            format!("the kernels in this program are damaged ({name}: {problem})"),
            "reinstall cotenant",
        )
    })?;
    Ok((image, name))
}

/// A zero-terminated image, verified by its packed checksum.
fn unpacked(packed: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut image = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut image)?;
    image.push(0);
    Ok(image)
}

const COMPUTE_80: &[u8] = include_bytes!("images/compute_80.ptx.gz");
const SM_87: &[u8] = include_bytes!("images/sm_87.cubin.gz");
const SM_90: &[u8] = include_bytes!("images/sm_90.cubin.gz");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_capability_has_its_image_and_older_ones_have_none() {
        for (capability, name) in [
            ((8, 7), "sm_87"),
            ((9, 0), "sm_90"),
            ((8, 6), "PTX"),
            ((12, 0), "PTX"),
        ] {
            let (image, found) = for_capability(capability).unwrap();
            assert_eq!(found, name);
            assert_eq!(image.starts_with(b"\x7fELF"), name != "PTX");
        }
        let refused = for_capability((7, 5)).unwrap_err();
        assert!(
            refused.to_string().contains("compute capability 7.5"),
            "{refused}"
        );
    }

    #[test]
    fn a_damaged_image_is_found() {
        for at in [100, SM_87.len() / 2, SM_87.len() - 6] {
            let mut damaged = SM_87.to_vec();
            damaged[at] ^= 4;
            assert!(unpacked(&damaged).is_err(), "byte {at}");
        }
        assert!(unpacked(&SM_87[..SM_87.len() - 9]).is_err());
    }
}
