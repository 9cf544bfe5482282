//! What `plan` says is what happens.
//!
//! Written for any set of fused kernels: where there is none for a call, `Fused` gives the reason that `plan` gave.

use candle_attention::{
    AttentionMask, Backend, SdpaOptions, plan, scaled_dot_product_attention, scaled_dot_product_attention_with_lse,
    scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Device, Tensor, Var};

use crate::check::{Arguments, check_with};
use crate::common::error_text;
use crate::oracle::Dims;
use crate::recipe::{Chosen, Kind, Layout, Reach, Recipe, dtypes};

crate::on_each_device!(
    auto_names_a_backend_and_a_reason,
    reference_is_what_runs_where_it_is_asked_for,
    fused_runs_or_says_why_not,
    every_tracked_input_leads_to_the_reference_path,
);

fn recipes(device: &Device) -> Vec<Recipe> {
    let all = Chosen { scale: true, softcap: true, alibi: true, sinks: true };
    let mut recipes = Vec::new();
    for &dtype in dtypes(device) {
        for masks in [vec![], vec![vec![Kind::Causal, Kind::Keep(Reach::Keys), Kind::Bias(Reach::Square)]]] {
            for chosen in [Chosen::default(), all] {
                recipes.push(Recipe {
                    dims: Dims { b: 2, h: 4, h_kv: 2, t_q: 3, t_kv: 5, d: 8, d_v: 8 },
                    layouts: [Layout::Contiguous; 3],
                    masks: masks.clone(),
                    uniform_empty_rows: false,
                    chosen,
                    dtype,
                    seed: 1,
                });
            }
        }
    }
    recipes
}

fn arguments(recipe: &Recipe, device: &Device, backend: Backend) -> Arguments {
    let mut arguments = Arguments::new(&recipe.case(), recipe.dtype, device).expect("the case becomes tensors");
    arguments.options = arguments.options.with_backend(backend);
    arguments
}

fn auto_names_a_backend_and_a_reason(device: &Device) {
    for recipe in recipes(device) {
        let Arguments { q, k, v, mask, options } = arguments(&recipe, device, Backend::Auto);
        let plan = plan(&q, &k, &v, &mask, &options).expect("the arguments fit");
        assert_ne!(plan.backend, Backend::Auto, "{plan}");
        assert!(!plan.reason.is_empty());
        assert_eq!(plan.to_string(), format!("{:?}: {}", plan.backend, plan.reason));
        scaled_dot_product_attention(&q, &k, &v, &mask, &options).expect("Auto never fails for want of a feature");
    }
}

fn reference_is_what_runs_where_it_is_asked_for(device: &Device) {
    for recipe in recipes(device) {
        let Arguments { q, k, v, mask, options } = arguments(&recipe, device, Backend::Reference);
        let plan = plan(&q, &k, &v, &mask, &options).expect("the arguments fit");
        assert_eq!((plan.backend, plan.reason.as_str()), (Backend::Reference, "asked for"));
        check_with(&recipe.case(), recipe.dtype, device, Backend::Reference).expect("the oracle's numbers");
    }
}

fn fused_runs_or_says_why_not(device: &Device) {
    for recipe in recipes(device) {
        let Arguments { q, k, v, mask, options } = arguments(&recipe, device, Backend::Auto);
        let auto = plan(&q, &k, &v, &mask, &options).expect("the arguments fit");
        let options = options.with_backend(Backend::Fused);
        let results = [
            ("plan", plan(&q, &k, &v, &mask, &options).map(|_| ())),
            ("scaled_dot_product_attention", scaled_dot_product_attention(&q, &k, &v, &mask, &options).map(|_| ())),
            (
                "scaled_dot_product_attention_with_lse",
                scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, &options).map(|_| ()),
            ),
        ];
        for (op, result) in results {
            match auto.backend {
                // The fused operations of GPUs give the context alone, which `plan` speaks of.
                _ if op.ends_with("_with_lse") && !device.is_cpu() => {
                    assert!(error_text(result).starts_with(&format!("[{op}] no fused path: ")));
                }
                Backend::Fused => result.unwrap_or_else(|error| panic!("{op}: {error}")),
                _ => assert_eq!(error_text(result), format!("[{op}] no fused path: {}", auto.reason)),
            }
        }
        let weights = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &options);
        let op = "scaled_dot_product_attention_with_weights";
        assert!(error_text(weights).starts_with(&format!("[{op}] no fused path: ")), "no fused kernel has weights");
    }
}

fn every_tracked_input_leads_to_the_reference_path(device: &Device) {
    let reason = "an input is tracked for gradients, which only the reference path has";
    let var = |tensor: &Tensor| Var::from_tensor(tensor).expect("a variable").into_inner();
    let recipe = &recipes(device)[0];
    let plain = || arguments(recipe, device, Backend::Auto);
    let heads = Tensor::ones(4, DType::F32, device).expect("ones");
    let bias = Tensor::zeros((3, 5), DType::F32, device).expect("zeros");
    let tracked = [
        ("q", Arguments { q: var(&plain().q), ..plain() }),
        ("k", Arguments { k: var(&plain().k), ..plain() }),
        ("v", Arguments { v: var(&plain().v), ..plain() }),
        ("bias", Arguments { mask: AttentionMask::none().with_bias(&var(&bias)), ..plain() }),
        ("joined bias", {
            let joined = AttentionMask::causal().and(&AttentionMask::none().with_bias(&var(&bias)));
            Arguments { mask: joined, ..plain() }
        }),
        ("slopes", Arguments { options: SdpaOptions::default().with_alibi_slopes(&var(&heads)), ..plain() }),
        ("sinks", Arguments { options: SdpaOptions::default().with_sinks(&var(&heads)), ..plain() }),
        // Not a variable itself, but computed from one.
        ("result", Arguments { q: (var(&plain().q) * 2.0).expect("a product"), ..plain() }),
    ];
    for (what, Arguments { q, k, v, mask, options }) in tracked {
        let auto = plan(&q, &k, &v, &mask, &options).expect("the arguments fit");
        assert_eq!((auto.backend, auto.reason.as_str()), (Backend::Reference, reason), "{what}");
        let fused = options.clone().with_backend(Backend::Fused);
        let error = error_text(scaled_dot_product_attention(&q, &k, &v, &mask, &fused));
        assert_eq!(error, format!("[scaled_dot_product_attention] no fused path: {reason}"), "{what}");
        let context = scaled_dot_product_attention(&q, &k, &v, &mask, &options).expect("the call runs");
        assert!(context.track_op(), "{what} leaves a trace in the context");
    }
    let Arguments { q, k, v, mask, options } = plain();
    let context = scaled_dot_product_attention(&q, &k, &v, &mask, &options).expect("the call runs");
    assert!(!context.track_op(), "nothing tracked, nothing recorded");
}
