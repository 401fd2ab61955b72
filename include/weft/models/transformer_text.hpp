// A transformer's configuration as text: one text for `weft train --config`, for C
// (weft_transformer_create_from_text) and for programs of one's own. Any thread.
#pragma once

#include <string>
#include <string_view>

#include "weft/models/transformer.hpp"

namespace weft {

/// The table [model] of a TOML text, whose keys are the members of TransformerConfig:
///
///     [model]
///     dim = 128
///     heads = 4
///     tied = true
///
/// Keys that it does not name are as in `initial`. If the text names heads or dim alone, or `initial` has 0,
/// kv_heads follows heads and ffn_hidden follows dim (usual_ffn_hidden). The rest of the text is ignored: it
/// may be a whole file for `weft train --config`.
///
/// Throws bad_argument naming `source` and the line: `run.toml:2: not TOML: …`,
/// `run.toml: has no table [model]`, `run.toml:3: [model] has no "head"; is heads meant?`,
/// `run.toml:3: heads is "4"; expected an integer`, `run.toml:2: heads is 0; expected 1 or more`; and what
/// TransformerConfig::check() says, of the line of the first key that it names.
TransformerConfig transformer_from_text(std::string_view text, std::string_view source = "text",
                                        const TransformerConfig& initial = {});

/// Such a text with every key, by which the configuration is the same when it is read: a table [model], ended
/// by a line feed.
std::string transformer_text(const TransformerConfig& config);

}  // namespace weft
