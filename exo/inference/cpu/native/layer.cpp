#include "layer.hpp"

namespace exo {

int Layer::index_dim() const {
  if (blocks) return blocks->dim;
  return latent && latent->indexer && !latent->indexer->pools ? latent->indexer->dim : 0;
}

int Layer::entry_ratio() const {
  return compressed ? compressed->ratio() : pools() != nullptr ? pools()->ratio : 0;
}

std::vector<HeadShape> Layer::entries() const {
  if (const Compressor* own = pools()) return {{1, own->dim, 0}};
  std::vector<HeadShape> found;
  if (compressed && compressed->compressor) found.push_back({1, compressed->dim, compressed->dim});
  if (compressed && compressed->indexer) found.push_back({1, compressed->indexer->dim, 0});
  return found;
}

int64_t Layer::mixer_floats(KVType type) const {
  if (const Compressor* own = pools()) return own->state_floats();
  if (compressed) {
    const CompressedAttention& own = *compressed;
    int64_t floats = own.window_floats(type);
    for (const auto& compressor : {own.compressor, own.index_compressor}) {
      if (compressor) floats += compressor->state_floats();
    }
    return floats;
  }
  if (delta_net) {
    const DeltaNet& net = *delta_net;
    return (net.convolution.taps - 1) * net.channels() +
           net.value_heads * state_size(net.value_dim, net.key_dim);
  }
  if (state_space) {
    const StateSpace& space = *state_space;
    return (space.convolution.taps - 1) * space.xbc->rows +
           space.heads * state_size(space.head_dim, space.state_dim);
  }
  if (selective_scan) {
    const SelectiveScan& scan = *selective_scan;
    return (scan.convolution.taps - 1 + scan.state_dim) * scan.channels();
  }
  if (short_convolution) {
    return (short_convolution->convolution.taps - 1) * short_convolution->x->rows;
  }
  return 0;
}

}  // namespace exo
