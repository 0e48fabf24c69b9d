// Logits of llama.cpp's own run of a model, in float32, for scripts/compare_logits.
// usage: llama_logits MODEL OUT plain|flash TOKEN...
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "llama.h"

int main(int count, char** words) {
  if (count < 5) return fputs("usage: llama_logits MODEL OUT plain|flash TOKEN...\n", stderr), 2;
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
      },
      nullptr);
  llama_model_params of_model = llama_model_default_params();
  of_model.n_gpu_layers = 0;
  llama_model* model = llama_model_load_from_file(words[1], of_model);
  if (model == nullptr) return 1;
  llama_context_params given = llama_context_default_params();
  given.n_ctx = given.n_batch = given.n_ubatch = 512;
  given.type_k = given.type_v = GGML_TYPE_F32;
  given.flash_attn_type = strcmp(words[3], "flash") == 0 ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                                                         : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* context = llama_init_from_model(model, given);
  if (context == nullptr) return 1;
  const int tokens = count - 4;
  llama_batch batch = llama_batch_init(tokens, 0, 1);
  batch.n_tokens = tokens;
  for (int i = 0; i < tokens; i++) {
    batch.token[i] = atoi(words[4 + i]);
    batch.pos[i] = i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  if (llama_decode(context, batch) != 0) return 1;
  const size_t width = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
  FILE* out = fopen(words[2], "wb");
  if (out == nullptr) return perror(words[2]), 1;
  for (int i = 0; i < tokens; i++) {
    if (fwrite(llama_get_logits_ith(context, i), sizeof(float), width, out) != width) return 1;
  }
  return fclose(out) == 0 ? 0 : 1;
}
