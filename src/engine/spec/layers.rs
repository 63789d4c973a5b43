//! Checked tensors of one layer.

use std::mem;

use super::{
    family::{
        Architecture, AttentionSpec, Beside, ConvolutionSpec, DeltaSpec, ExpertSpec, HeadNorms,
        LayerSpec, Matrix, Role, ScanSpec, Scores, Vector,
    },
    tensors::{bad_shape, tensor, vector},
};
use crate::{
    error::LoadErrorKind,
    gguf::{Header, TensorInfo},
};
use cotenant_policy::residency::LayerKind;
use cotenant_units::Bytes;

/// Finds the tensors of one layer.
pub(super) struct LayerBuilder<'spec> {
    pub(super) header: &'spec Header,
    pub(super) prefix: String,
    pub(super) width: usize,
    pub(super) feed_forward: usize,
    pub(super) experts: Option<&'spec ExpertSpec>,
    pub(super) attention: &'spec AttentionSpec,
    /// The layer's index, and the width of its own input, if it has one.
    pub(super) input: Option<(usize, usize)>,
    /// Found so far, in the order of use.
    pub(super) matrices: Vec<Matrix>,
    pub(super) vectors: Vec<(Vector, TensorInfo)>,
}

impl<'spec> LayerBuilder<'spec> {
    pub(super) fn attention(
        &mut self,
        architecture: Architecture,
        local: bool,
        borrows: bool,
    ) -> Result<LayerSpec, LoadErrorKind> {
        let width = self.width;
        let spec = self.attention.of_layers(local);
        let (query, kv) = (spec.query(), spec.kv());
        let norms = architecture.norms();
        if norms.before {
            self.vector(Vector::MixerNorm, "attn_norm.weight", &[width])?;
        }
        if architecture.centres() {
            self.vector(Vector::MixerNormBias, "attn_norm.bias", &[width])?;
        }
        self.projections(&spec, borrows, architecture == Architecture::Gemma4)?;
        let lengths = match norms.heads {
            HeadNorms::None => None,
            HeadNorms::Each => Some((spec.head_dim, spec.head_dim)),
            HeadNorms::Whole => Some((query, kv)),
        };
        if let Some((query, key)) = lengths {
            self.vector(Vector::QueryNorm, "attn_q_norm.weight", &[query])?;
            if !borrows {
                self.vector(Vector::KeyNorm, "attn_k_norm.weight", &[key])?;
            }
        }
        if architecture == Architecture::GptOss {
            self.vector(Vector::Sinks, "attn_sinks.weight", &[spec.heads])?;
        }
        if norms.after {
            self.vector(
                Vector::MixerPostNorm,
                "post_attention_norm.weight",
                &[width],
            )?;
            self.vector(Vector::FfnPostNorm, "post_ffw_norm.weight", &[width])?;
        }
        self.feed_forward(architecture)?;
        self.layer_input()?;
        Ok(self.found(LayerKind::Attention, local, borrows))
    }

    /// A layer of an encoder after the norm before it, with a gate or without one in its feed-forward part.
    pub(super) fn encoder(&mut self, has_gate: bool) -> Result<LayerSpec, LoadErrorKind> {
        let (width, inner) = (self.width, self.feed_forward);
        let spec = *self.attention;
        self.projections(&spec, false, false)?;
        self.vector(Vector::FfnNorm, "attn_output_norm.weight", &[width])?;
        self.vector(Vector::FfnNormBias, "attn_output_norm.bias", &[width])?;
        if has_gate {
            self.matrix(Role::FfnGate, "ffn_gate.weight", width, inner)?;
        }
        self.matrix(Role::FfnUp, "ffn_up.weight", width, inner)?;
        self.matrix(Role::FfnDown, "ffn_down.weight", inner, width)?;
        self.bias(Vector::FfnUpBias, "ffn_up.bias", inner)?;
        self.bias(Vector::FfnDownBias, "ffn_down.bias", width)?;
        Ok(self.found(LayerKind::Attention, false, false))
    }

    /// Projections to queries, keys and values, and back; `borrows` says that only queries are projected.
    fn projections(
        &mut self,
        spec: &AttentionSpec,
        borrows: bool,
        keys_are_values: bool,
    ) -> Result<(), LoadErrorKind> {
        let (width, kv) = (self.width, spec.kv());
        let (query, projected) = (spec.query(), spec.projected());
        let parts = [
            (Role::Query, Vector::QueryBias, "attn_q", projected),
            (Role::Key, Vector::KeyBias, "attn_k", kv),
            (Role::Value, Vector::ValueBias, "attn_v", kv),
        ];
        let rows = parts.map(|(_, _, _, rows)| rows);
        // Some converters store the three projections in one tensor, with their rows one after another.
        let fused = self.find("attn_qkv.weight").is_some();
        if fused {
            let roles = [Role::Query, Role::Key, Role::Value];
            self.parts(roles, "attn_qkv.weight", width, rows)?;
        }
        let fused_bias = self
            .find("attn_qkv.bias")
            .map(|info| self.bias_parts(info, rows))
            .transpose()?;
        let own = if borrows { 1 } else { parts.len() };
        for (index, (role, bias, name, rows)) in parts.into_iter().take(own).enumerate() {
            if !fused {
                // Gemma 4 12B has no values in some layers: they are the projected keys.
                let lacks = role == Role::Value && self.find("attn_v.weight").is_none();
                let name = match lacks && keys_are_values {
                    true => "attn_k",
                    false => name,
                };
                self.matrix(role, &format!("{name}.weight"), width, rows)?;
            }
            match fused_bias.as_ref().and_then(|parts| parts.get(index)) {
                Some(part) => self.vectors.push((bias, part.clone())),
                None => self.bias(bias, &format!("{name}.bias"), rows)?,
            }
        }
        self.matrix(Role::Output, "attn_output.weight", query, width)?;
        self.bias(Vector::OutputBias, "attn_output.bias", width)?;
        Ok(())
    }

    /// The block that drafts a token from the next one and the state before it; `None` if the file lacks it, or if it has
    /// embeddings or a head of its own.
    pub(super) fn draft(
        &mut self,
        architecture: Architecture,
    ) -> Result<Option<LayerSpec>, LoadErrorKind> {
        let own = ["nextn.embed_tokens.weight", "nextn.shared_head_head.weight"];
        if self.find(DRAFT_PROJECTION).is_none() || own.iter().any(|own| self.find(own).is_some()) {
            return Ok(None);
        }
        let width = self.width;
        self.matrix(Role::Draft, DRAFT_PROJECTION, 2 * width, width)?;
        self.vector(Vector::DraftEmbeddingNorm, "nextn.enorm.weight", &[width])?;
        self.vector(Vector::DraftStateNorm, "nextn.hnorm.weight", &[width])?;
        self.bias(Vector::DraftOutputNorm, DRAFT_NORM, width)?;
        self.attention(architecture, false, false).map(Some)
    }

    pub(super) fn convolution(
        &mut self,
        spec: &ConvolutionSpec,
    ) -> Result<LayerSpec, LoadErrorKind> {
        let (width, channels) = (self.width, spec.channels);
        self.matrix(Role::Gates, "shortconv.in_proj.weight", width, 3 * channels)?;
        self.matrix(Role::Output, "shortconv.out_proj.weight", channels, width)?;
        self.vector(Vector::MixerNorm, "attn_norm.weight", &[width])?;
        self.vector(
            Vector::Convolution,
            "shortconv.conv.weight",
            &[spec.taps, channels],
        )?;
        self.feed_forward(Architecture::Lfm2)?;
        Ok(self.found(LayerKind::Recurrent, false, false))
    }

    pub(super) fn delta(
        &mut self,
        architecture: Architecture,
        spec: &DeltaSpec,
    ) -> Result<LayerSpec, LoadErrorKind> {
        let width = self.width;
        self.matrix(
            Role::QueryKeyValue,
            "attn_qkv.weight",
            width,
            spec.channels(),
        )?;
        self.matrix(Role::Gate, "attn_gate.weight", width, spec.values())?;
        self.matrix(Role::Alpha, "ssm_alpha.weight", width, spec.value_heads)?;
        self.matrix(Role::Beta, "ssm_beta.weight", width, spec.value_heads)?;
        self.matrix(Role::Output, "ssm_out.weight", spec.values(), width)?;
        self.vector(Vector::MixerNorm, "attn_norm.weight", &[width])?;
        self.vector(
            Vector::Convolution,
            "ssm_conv1d.weight",
            &[spec.taps, spec.channels()],
        )?;
        self.vector(Vector::DecayBias, "ssm_dt.bias", &[spec.value_heads])?;
        self.vector(Vector::Decay, "ssm_a", &[spec.value_heads])?;
        self.vector(Vector::StateNorm, "ssm_norm.weight", &[spec.head_dim])?;
        self.feed_forward(architecture)?;
        Ok(self.found(LayerKind::Recurrent, false, false))
    }

    pub(super) fn scan(
        &mut self,
        architecture: Architecture,
        spec: &ScanSpec,
    ) -> Result<LayerSpec, LoadErrorKind> {
        let (width, values, channels) = (self.width, spec.values(), spec.channels());
        let roles = [Role::Gate, Role::QueryKeyValue, Role::Alpha];
        let rows = [values, channels, spec.heads];
        self.parts(roles, "ssm_in.weight", width, rows)?;
        self.matrix(Role::Output, "ssm_out.weight", values, width)?;
        self.vector(Vector::MixerNorm, "attn_norm.weight", &[width])?;
        let taps = [spec.taps, channels];
        self.vector(Vector::Convolution, "ssm_conv1d.weight", &taps)?;
        self.bias(Vector::ConvolutionBias, "ssm_conv1d.bias", channels)?;
        self.vector(Vector::DecayBias, "ssm_dt.bias", &[spec.heads])?;
        self.vector(Vector::Decay, "ssm_a", &[1, spec.heads])?;
        self.vector(Vector::Skip, "ssm_d", &[1, spec.heads])?;
        let norm = [values / spec.groups, spec.groups];
        self.vector(Vector::StateNorm, "ssm_norm.weight", &norm)?;
        self.feed_forward(architecture)?;
        Ok(self.found(LayerKind::Recurrent, false, false))
    }

    fn found(&mut self, kind: LayerKind, local: bool, borrows: bool) -> LayerSpec {
        LayerSpec {
            kind,
            local,
            borrows,
            matrices: mem::take(&mut self.matrices),
            vectors: mem::take(&mut self.vectors),
        }
    }

    /// A layer without a mixer.
    pub(super) fn feed_forward_alone(
        &mut self,
        architecture: Architecture,
    ) -> Result<LayerSpec, LoadErrorKind> {
        self.feed_forward(architecture)?;
        Ok(self.found(LayerKind::FeedForward, false, false))
    }

    fn feed_forward(&mut self, architecture: Architecture) -> Result<(), LoadErrorKind> {
        let width = self.width;
        if self.feed_forward == 0 {
            return Ok(());
        }
        let norm = match architecture {
            _ if architecture.is_nemotron() => "attn_norm.weight",
            Architecture::GptOss | Architecture::Qwen35 | Architecture::Qwen35Moe => {
                "post_attention_norm.weight"
            }
            _ => "ffn_norm.weight",
        };
        if architecture.norms().before {
            self.vector(Vector::FfnNorm, norm, &[width])?;
        }
        if architecture.centres() {
            self.vector(Vector::FfnNormBias, "ffn_norm.bias", &[width])?;
        }
        if let Some(experts) = self.experts {
            return self.mixture(experts, !architecture.is_nemotron());
        }
        if architecture == Architecture::Phi3 && self.find("ffn_gate.weight").is_none() {
            // Gate and up in one tensor, the gate first (`ggml_swiglu`).
            let (roles, rows) = ([Role::FfnGate, Role::FfnUp], [self.feed_forward; 2]);
            self.parts(roles, "ffn_up.weight", width, rows)?;
        } else {
            if !architecture.is_nemotron() {
                self.matrix(Role::FfnGate, "ffn_gate.weight", width, self.feed_forward)?;
            }
            self.matrix(Role::FfnUp, "ffn_up.weight", width, self.feed_forward)?;
        }
        self.matrix(Role::FfnDown, "ffn_down.weight", self.feed_forward, width)?;
        for (bias, name, elements) in [
            (Vector::FfnGateBias, "ffn_gate.bias", self.feed_forward),
            (Vector::FfnUpBias, "ffn_up.bias", self.feed_forward),
            (Vector::FfnDownBias, "ffn_down.bias", width),
        ] {
            self.bias(bias, name, elements)?;
        }
        Ok(())
    }

    /// The layer's own input, and the factor of its result.
    fn layer_input(&mut self) -> Result<(), LoadErrorKind> {
        let width = self.width;
        if let Some((index, inner)) = self.input {
            self.matrix(Role::LayerGate, "inp_gate.weight", width, inner)?;
            let all = tensor(self.header, LAYER_PROJECTION)?;
            let row_bytes = width / all.dtype.block_size() * all.dtype.type_size();
            let part = TensorInfo {
                dims: vec![width as u64, inner as u64],
                offset: all.offset + (index * inner * row_bytes) as u64,
                bytes: Bytes::of_len(inner * row_bytes),
                ..all.clone()
            };
            self.matrix_of(Role::LayerInput, part, width, inner);
            self.matrix(Role::LayerOutput, "proj.weight", inner, width)?;
            let norm = vector(self.header, LAYER_INPUT_NORM, &[inner])?;
            self.vectors.push((Vector::LayerInputNorm, norm));
            self.vector(Vector::LayerPostNorm, "post_norm.weight", &[width])?;
        }
        self.bias(Vector::LayerScale, "layer_output_scale.weight", 1)
    }

    fn mixture(&mut self, spec: &ExpertSpec, has_gates: bool) -> Result<(), LoadErrorKind> {
        let (width, inner) = (self.width, spec.inner);
        if spec.scores == Scores::Sigmoid {
            self.vector(Vector::ScoreBias, "exp_probs_b.bias", &[spec.count])?;
        }
        self.matrix(Role::Router, "ffn_gate_inp.weight", width, spec.count)?;
        if spec.scores == Scores::Logits {
            let bias = "ffn_gate_inp.bias";
            self.vector(Vector::RouterBias, bias, &[spec.count])?;
            for (bias, name, elements) in [
                (Vector::ExpertGateBias, "gate", inner),
                (Vector::ExpertUpBias, "up", inner),
                (Vector::ExpertDownBias, "down", width),
            ] {
                let name = format!("ffn_{name}_exps.bias");
                self.vector(bias, &name, &[elements, spec.count])?;
            }
        }
        let kind = match spec.beside {
            Beside::Added(_) => Some("_shexp"),
            Beside::Nothing => None,
            Beside::Gated(_) => {
                let gate = "ffn_gate_inp_shexp.weight";
                self.matrix(Role::SharedGate, gate, width, 1)?;
                Some("_shexp")
            }
            Beside::Normed(_) => {
                for (norm, name) in [
                    (Vector::RouterScale, "ffn_gate_inp.scale"),
                    (Vector::ExpertNorm, "pre_ffw_norm_2.weight"),
                    (Vector::ExpertPostNorm, "post_ffw_norm_2.weight"),
                    (Vector::FfnBesideNorm, "post_ffw_norm_1.weight"),
                ] {
                    self.vector(norm, name, &[width])?;
                }
                let scale = "ffn_down_exps.scale";
                self.bias(Vector::ExpertScale, scale, spec.count)?;
                Some("")
            }
        };
        if let Some(kind) = kind {
            let beside = spec.beside.width();
            for (role, name, columns, rows) in [
                (Role::FfnGate, "gate", width, beside),
                (Role::FfnUp, "up", width, beside),
                (Role::FfnDown, "down", beside, width),
            ] {
                if role == Role::FfnGate && !has_gates {
                    continue;
                }
                let name = format!("ffn_{name}{kind}.weight");
                self.matrix(role, &name, columns, rows)?;
            }
        }
        for (role, name, columns, rows) in [
            (Role::ExpertGate, "ffn_gate_exps.weight", width, inner),
            (Role::ExpertUp, "ffn_up_exps.weight", width, inner),
            (Role::ExpertDown, "ffn_down_exps.weight", inner, width),
        ] {
            if role == Role::ExpertGate && !has_gates {
                continue;
            }
            if self.find(name).is_none() && self.find(OLD_EXPERT).is_some() {
                return Err(LoadErrorKind::OldExperts);
            }
            // Some converters store the gate and the other factor of an expert in one tensor, the gate first.
            let fused = (role != Role::ExpertDown && self.find(FUSED_EXPERTS).is_some())
                .then_some(FUSED_EXPERTS);
            let name = fused.unwrap_or(name);
            let info = tensor(self.header, &format!("{}{name}", self.prefix))?;
            let dims = [
                columns,
                if fused.is_some() { 2 * rows } else { rows },
                spec.count,
            ];
            if !info.has_dims(&dims.map(|dim| dim as u64)) {
                return Err(bad_shape(info, &format!("{dims:?}")));
            }
            let rows = rows.saturating_mul(spec.count);
            self.matrix_of(role, info.clone(), columns, rows);
        }
        Ok(())
    }

    /// A bias, a factor or a norm, if the file has one.
    fn bias(&mut self, bias: Vector, name: &str, elements: usize) -> Result<(), LoadErrorKind> {
        match self.find(name) {
            Some(_) => self.vector(bias, name, &[elements]),
            None => Ok(()),
        }
    }

    fn matrix(
        &mut self,
        role: Role,
        name: &str,
        columns: usize,
        rows: usize,
    ) -> Result<(), LoadErrorKind> {
        self.parts([role], name, columns, [rows])
    }

    fn matrix_of(&mut self, role: Role, tensor: TensorInfo, columns: usize, rows: usize) {
        self.matrices.push(Matrix {
            role,
            columns,
            rows,
            row_bytes: columns / tensor.dtype.block_size() * tensor.dtype.type_size(),
            tensor,
        });
    }

    fn find(&self, name: &str) -> Option<&'spec TensorInfo> {
        self.header.tensor(&format!("{}{name}", self.prefix))
    }

    /// A matrix with the rows of several, one after another.
    fn parts<const N: usize>(
        &mut self,
        roles: [Role; N],
        name: &str,
        columns: usize,
        rows: [usize; N],
    ) -> Result<(), LoadErrorKind> {
        let info = tensor(self.header, &format!("{}{name}", self.prefix))?;
        let all: usize = rows.iter().sum();
        if !info.has_dims(&[columns as u64, all as u64]) {
            return Err(bad_shape(info, &format!("[{columns}, {all}]")));
        }
        let row_bytes = (columns / info.dtype.block_size() * info.dtype.type_size()) as u64;
        let mut first = 0u64;
        for (role, rows) in roles.into_iter().zip(rows) {
            let part = TensorInfo {
                dims: vec![columns as u64, rows as u64],
                offset: info.offset + first * row_bytes,
                bytes: Bytes::new(rows as u64 * row_bytes),
                ..info.clone()
            };
            first += rows as u64;
            self.matrix_of(role, part, columns, rows);
        }
        Ok(())
    }

    /// As [`Self::parts`], for a bias.
    fn bias_parts<const N: usize>(
        &self,
        info: &TensorInfo,
        elements: [usize; N],
    ) -> Result<[TensorInfo; N], LoadErrorKind> {
        let all: usize = elements.iter().sum();
        let whole = vector(self.header, &info.name, &[all])?;
        let size = whole.dtype.type_size() as u64;
        let mut first = 0u64;
        Ok(elements.map(|elements| {
            let part = TensorInfo {
                dims: vec![elements as u64],
                offset: whole.offset + first * size,
                bytes: Bytes::new(elements as u64 * size),
                ..whole.clone()
            };
            first += elements as u64;
            part
        }))
    }

    fn vector(&mut self, kind: Vector, name: &str, dims: &[usize]) -> Result<(), LoadErrorKind> {
        let found = vector(self.header, &format!("{}{name}", self.prefix), dims)?;
        self.vectors.push((kind, found));
        Ok(())
    }
}

/// Projection of a token's embedding to the inputs of all layers, whose rows are one after another.
pub(super) const LAYER_PROJECTION: &str = "per_layer_model_proj.weight";
/// Norm of the projection to each layer's input.
pub(super) const LAYER_INPUT_NORM: &str = "per_layer_proj_norm.weight";
/// Projection of a draft block's input: the normed embedding, then the normed state.
const DRAFT_PROJECTION: &str = "nextn.eh_proj.weight";
/// Norm before the head of a draft; the model's own if the file has none.
const DRAFT_NORM: &str = "nextn.shared_head_norm.weight";
/// Gates and other factors of all experts in one tensor.
const FUSED_EXPERTS: &str = "ffn_gate_up_exps.weight";
/// The first expert's gate in files of before April 2024, when each expert had tensors of its own.
const OLD_EXPERT: &str = "ffn_gate.0.weight";
