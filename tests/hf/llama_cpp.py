"""llama.cpp as the judge of GGUF files: its converter writes a file of a checkpoint, and its library computes logits.

The converter is in the source of llama.cpp, which the source package of llama-cpp-python contains. The library is in the
package xllamacpp, and llama-cpp-py-sync declares its functions (`requirements_gguf.txt`).
"""

import json
import logging
import sys

import numpy as np
import torch


def use_source(folder):
    """Makes the Python modules of a folder of llama.cpp's source importable."""
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    logging.getLogger().setLevel(logging.ERROR)


def convert(folder, file, vocab_size):
    """Writes a checkpoint's folder as a file in f32, with a vocabulary of tokens without text."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    fields = ModelBase.load_hparams(folder, False)
    converter = get_model_class(get_model_architecture(fields, ModelType.TEXT))
    # The models have no layers that predict more tokens after the next one.
    ModelBase.no_mtp = True
    # Some converters count the tokens of the file, and nothing else.
    vocabulary = {"model": {"vocab": {str(token): token for token in range(vocab_size)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    with torch.inference_mode():
        model = converter(folder, gguf.LlamaFileType.ALL_F32, file, eager=True)
        # Some converters choose another one for each version of a model.
        writing = getattr(model, "impl", model)

        def set_vocab():
            writing.gguf_writer.add_tokenizer_model("none")
            writing.gguf_writer.add_vocab_size(vocab_size)
            # For embeddings of kinds of tokens, which BERT has.
            writing.gguf_writer.add_token_type_count(fields.get("type_vocab_size") or 1)

        writing.set_vocab = set_vocab
        model.write()


class Library:
    """llama.cpp's library. A call returns one row of numbers for each token of a text."""

    def __init__(self):
        import xllamacpp
        from llama_cpp_py_sync import _cffi_bindings as bindings

        self.ffi = bindings.get_ffi()
        self.lib = self.ffi.dlopen(xllamacpp.xllamacpp.__file__)
        self.log = []
        self.on_log = self.ffi.callback(
            "void(enum ggml_log_level, const char *, void *)", lambda _, text, __: self.log.append(self.text(text))
        )
        self.lib.llama_log_set(self.on_log, self.ffi.NULL)
        self.lib.llama_backend_init()

    def text(self, pointer):
        return self.ffi.string(pointer).decode(errors="replace")

    def run(self, file, ids, width, embeds=False, decoder_ids=None):
        """Returns the logits (T, width) of a decoder or, if `embeds`, the last layer's outputs.

        The decoder of a model with an encoder gets `decoder_ids`, and the encoder `ids`.
        """
        self.log.clear()
        options = self.lib.llama_model_default_params()
        options.use_extra_bufts = False
        model = self.lib.llama_model_load_from_file(str(file).encode(), options)
        assert model != self.ffi.NULL, "".join(self.log[-4:])
        options = self.lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 64
        options.n_threads = options.n_threads_batch = 1
        options.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.type_k = options.type_v = self.lib.GGML_TYPE_F32
        options.embeddings = embeds
        options.pooling_type = self.lib.LLAMA_POOLING_TYPE_NONE
        context = self.lib.llama_init_from_model(model, options)
        assert context != self.ffi.NULL, "".join(self.log[-4:])
        if decoder_ids:
            self.call(self.lib.llama_encode, context, ids)
            ids = decoder_ids
        self.call(self.lib.llama_encode if embeds else self.lib.llama_decode, context, ids)
        numbers = self.lib.llama_get_embeddings(context) if embeds else self.lib.llama_get_logits(context)
        rows = np.frombuffer(self.ffi.buffer(numbers, 4 * len(ids) * width), dtype=np.float32).reshape(len(ids), width)
        rows = torch.from_numpy(rows.copy())
        self.lib.llama_free(context)
        self.lib.llama_model_free(model)
        return rows

    def call(self, function, context, ids):
        """Passes tokens to a model's encoder or decoder."""
        batch = self.lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
        code = function(context, batch)
        self.lib.llama_batch_free(batch)
        assert code == 0, f"{code}: {''.join(self.log[-4:])}"
