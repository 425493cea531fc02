"""The parts of the pipeline, all of stock classes: tokenizer, text encoder, transformer, VAE, noise scheduler.

The tokenizer's normaliser reads the caption's grammar: a colour that belongs to the background becomes a word
of its own ("blue background" -> "behind_blue"), so which colour goes where needs no learning. Words that
the model does not know are dropped there.
"""

import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, PixArtTransformer2DModel
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from tools.picture_model.scenes import COLOURS, RADII, SHAPES

SIDE = 64  # pixels
PATCH = 8  # 64 tokens a picture
NUM_BLOCKS = 8
NUM_HEADS = 5
HEAD_DIM = 32
TEXT_DIM = 64
FLOW_SHIFT = 4.0  # flat pictures show their colours even at 90 % noise: most steps belong near pure noise
MAX_WORDS = 120  # the pipeline asks for as many

SYNONYMS = {
    "large": "big|huge|giant",
    "small": "tiny|little",
    "circle": "disc|disk|dot|ball",
    "square": "box",
    "cross": "plus",
    "diamond": "rhombus|lozenge",
    "ring": "donut|hoop",
    "purple": "violet",
    "cyan": "turquoise|teal",
    "top": "upper",
    "bottom": "lower",
    "middle": "center|centre|central",
    "background": "backdrop|ground|field|canvas|wall|sky",
}
SPECIAL = ("<pad>", "</s>", "<unk>")


def words() -> list[str]:
    """Return every word that reaches the text encoder, the special ones first."""
    places = ["left", "right", "top", "bottom", "middle"]
    behind = [f"behind_{colour}" for colour in COLOURS]
    return [*SPECIAL, *COLOURS, *behind, *SHAPES, *RADII, *places]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer whose normaliser marks the background's colour."""
    vocabulary = words()
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, "<unk>"))
    known = "|".join(vocabulary[len(SPECIAL) :])
    shapes = "|".join(SHAPES)
    rules: list[normalizers.Normalizer] = [normalizers.Lowercase()]
    rules += [normalizers.Replace(Regex(rf"\b(?:{old})\b"), new) for new, old in SYNONYMS.items()]
    for colour in COLOURS:
        rules += [
            normalizers.Replace(Regex(pattern), f"behind_{colour}")
            for pattern in (
                rf"\b{colour}\b(?=(?: plain| solid| coloured| colored)? background\b)",
                rf"(?<=\bbackground is |\bbackground of |\bbackground in |\bbackground: |\bin front of ){colour}\b",
                rf"(?<=\bon |\bover |\bagainst |\bon a |\bover a |\bon an ){colour}\b(?! (?:{shapes})\b)",
            )
        ]
    rules.append(normalizers.Replace(Regex(r"[^a-z_]+"), " "))
    rules.append(normalizers.Replace(Regex(rf"\b(?!(?:{known})\b)[a-z_]+"), ""))
    tokenizer.normalizer = normalizers.Sequence(rules)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary.index("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_WORDS,
    )


def build_text_encoder() -> T5EncoderModel:
    """Return a two-layer T5 encoder, trained together with the transformer."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(words()),
            d_model=TEXT_DIM,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def build_transformer() -> PixArtTransformer2DModel:
    """Return the diffusion transformer: it names the clean picture itself, so a patch may be wider than a token."""
    return PixArtTransformer2DModel(
        num_attention_heads=NUM_HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=3,
        out_channels=3,
        num_layers=NUM_BLOCKS,
        cross_attention_dim=NUM_HEADS * HEAD_DIM,
        sample_size=SIDE,
        patch_size=PATCH,
        caption_channels=TEXT_DIM,
        interpolation_scale=1,
        use_additional_conditions=False,
    )


def build_noise_scheduler() -> DPMSolverMultistepScheduler:
    """Return the sampler for x_t = (1 - sigma) x + sigma noise and a model that answers x."""
    return DPMSolverMultistepScheduler(
        use_flow_sigmas=True, flow_shift=FLOW_SHIFT, prediction_type="sample", final_sigmas_type="zero"
    )


def build_identity_vae() -> AutoencoderKL:
    """Return an `AutoencoderKL` whose latents are the pixels, with weights set by hand (error about 1e-3).

    Each channel travels as x and -x beside two constants of 100 and -100: the group norm over all eight then
    has mean 0 and deviation 50, undone by its own weight, and silu(x) - silu(-x) = x.
    """
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=3,
        norm_num_groups=1,
        sample_size=SIDE,
        scaling_factor=1.0,
        mid_block_add_attention=False,
    )
    with torch.no_grad():
        for name, weight in vae.named_parameters():
            if "norm" not in name:
                weight.zero_()
        for half in (vae.encoder, vae.decoder):
            for channel in range(3):
                for sign, place in ((1.0, 2 * channel), (-1.0, 2 * channel + 1)):
                    half.conv_in.weight[place, channel, 1, 1] = sign
                    half.conv_out.weight[channel, place, 1, 1] = sign
            half.conv_in.bias[6:] = torch.tensor([100.0, -100.0])
            half.conv_norm_out.weight.fill_(50.0)
        vae.encoder.conv_out.bias[3:] = -30.0  # the logarithm of the variance: none
        for layer in (vae.quant_conv, vae.post_quant_conv):
            layer.weight[:, :, 0, 0] = torch.eye(layer.weight.shape[0])
    return vae
