"""The built-in parts, by name. Declared as import paths: nothing is imported until it is used."""

from __future__ import annotations

from lavis_ds import registry as r


def declare() -> None:
    """Put every built-in part into its registry."""
    model_configs, data_configs, task_configs = (
        "lavis_ds.models.configs",
        "lavis_ds.data.configs",
        "lavis_ds.tasks.configs",
    )

    for name, target, config in [
        ("vlm", "lavis_ds.models.vlm:Vlm", "VlmConfig"),
        ("minigpt4qwen", "lavis_ds.models.minigpt4qwen:MiniGPT4Qwen", "MiniGPT4QwenConfig"),
        ("llava_qwen", "lavis_ds.models.llava_qwen:LlavaQwen", "LlavaQwenConfig"),
        ("qwen2_5_vl", "lavis_ds.models.qwen_vl:Qwen2_5VL", "Qwen2_5VLConfig"),
        ("qwen3_vl", "lavis_ds.models.qwen_vl:Qwen3VL", "Qwen3VLConfig"),
        ("qwen3_vl_moe", "lavis_ds.models.qwen_vl:Qwen3VLMoE", "Qwen3VLMoEConfig"),
    ]:
        r.models.declare(name, target, f"{model_configs}:{config}")
    r.vision_encoders.declare("timm_vit", "lavis_ds.models.vision.timm_vit:TimmViT", f"{model_configs}:TimmViTConfig")
    r.vision_encoders.declare(
        "hf_vision", "lavis_ds.models.vision.hf_vision:HFVision", f"{model_configs}:HFVisionConfig"
    )
    r.projectors.declare(
        "linear", "lavis_ds.models.projectors.linear:LinearProjector", f"{model_configs}:LinearProjectorConfig"
    )
    r.vision_encoders.declare(
        "siglip2_naflex",
        "lavis_ds.models.vision.siglip2_naflex:Siglip2NaFlex",
        f"{model_configs}:Siglip2NaFlexConfig",
    )
    for name, target, config in [
        ("mlp", "mlp:MLPProjector", "MLPProjectorConfig"),
        ("average_pool", "average_pool:AveragePoolProjector", "AveragePoolProjectorConfig"),
        ("c_abstractor", "c_abstractor:CAbstractorProjector", "CAbstractorProjectorConfig"),
        ("perceiver", "perceiver:PerceiverProjector", "PerceiverProjectorConfig"),
        ("qformer", "qformer:QFormerProjector", "QFormerProjectorConfig"),
    ]:
        r.projectors.declare(name, f"lavis_ds.models.projectors.{target}", f"{model_configs}:{config}")
    r.language_models.declare(
        "hf_causal_lm", "lavis_ds.models.language.hf_causal_lm:HFCausalLM", f"{model_configs}:HFCausalLMConfig"
    )

    for name, target, config in [
        ("minigpt4qwen_json", "lavis_ds.data.builders.minigpt4qwen_json:MiniGPT4QwenJson", "MiniGPT4QwenJsonConfig"),
        ("llava_json", "lavis_ds.data.builders.llava_json:LlavaJson", "LlavaJsonConfig"),
        ("messages", "lavis_ds.data.builders.messages:Messages", "MessagesConfig"),
        ("sharegpt", "lavis_ds.data.builders.sharegpt:ShareGPT", "ShareGPTConfig"),
        ("captions", "lavis_ds.data.builders.captions:Captions", "CaptionsConfig"),
        ("coco_captions", "lavis_ds.data.builders.coco_captions:CocoCaptions", "CocoCaptionsConfig"),
        ("vqa", "lavis_ds.data.builders.vqa:VQAFiles", "VQAFilesConfig"),
        ("text", "lavis_ds.data.builders.text:PlainText", "TextConfig"),
        ("webdataset", "lavis_ds.data.builders.webdataset:WebDataset", "WebDatasetConfig"),
        ("easy_vqa", "lavis_ds.data.builders.easy_vqa:EasyVQA", "EasyVQAConfig"),
        ("emoji", "lavis_ds.data.builders.emoji:Emoji", "EmojiConfig"),
    ]:
        r.builders.declare(name, target, f"{data_configs}:{config}")
    r.processors.declare("image_train", "lavis_ds.data.processors.image:ImageTrain", f"{data_configs}:ImageTrainConfig")
    r.processors.declare("image_eval", "lavis_ds.data.processors.image:ImageEval", f"{data_configs}:ImageEvalConfig")
    r.processors.declare(
        "image_anyres", "lavis_ds.data.processors.anyres:ImageAnyRes", f"{data_configs}:ImageAnyResConfig"
    )
    for name, target in [
        ("blip2_image_train", "ImageTrain"),
        ("blip_image_train", "ImageTrain"),
        ("blip_image_eval", "ImageEval"),
    ]:
        r.processors.declare(name, f"lavis_ds.data.processors.image:{target}", f"{data_configs}:{target}Config")
    r.processors.declare(
        "image_native", "lavis_ds.data.processors.native:ImageNative", f"{data_configs}:ImageNativeConfig"
    )
    r.processors.declare("plain", "lavis_ds.data.processors.plain:Plain", f"{data_configs}:PlainConfig")
    r.processors.declare("chat", "lavis_ds.data.processors.chat:Chat", f"{data_configs}:ChatConfig")

    r.tasks.declare("instruct", "lavis_ds.tasks.instruct:InstructTask", f"{task_configs}:InstructConfig")
    r.tasks.declare("vqa", "lavis_ds.tasks.vqa:VQATask", f"{task_configs}:VQAConfig")
    r.runners.declare("train", "lavis_ds.runners.train:TrainRunner", "lavis_ds.runners.configs:TrainRunnerConfig")
    r.engines.declare("deepspeed", "lavis_ds.engines.deepspeed:DeepSpeedEngine", "lavis_ds.config.base:Config")
    r.engines.declare("torch", "lavis_ds.engines.torch:TorchEngine", "lavis_ds.config.base:Config")
    for name, function in [
        ("constant", "constant"),
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("linear_warmup_cosine_lr", "cosine"),
        ("linear_warmup_cosine_lr_step-wise", "cosine"),
        ("constant_lr", "constant"),
    ]:
        r.lr_schedulers.declare(name, f"lavis_ds.optim.schedules:{function}", "lavis_ds.config.base:Config")
