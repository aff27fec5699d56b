// Text streams of the C++ face, on a stand-in for the library.
#include <skipdecode/skipdecode.hpp>
#include <string>

#include "catch.h"
#include "standin_library.h"

TEST_CASE("a text stream starts afresh after its end") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  skipdecode::TextStream stream(tokenizer);
  for (int token = 0; token < 1000; ++token) CHECK(stream.Add(0x80).empty());
  CHECK(stream.End().size() == 3000);
  CHECK(stream.Add('a') == "a");
}

TEST_CASE("streaming costs time linear in the text, even where nothing can be given yet") {
  const auto bundle = skipdecode::Bundle::Load("");
  skipdecode::Tokenizer tokenizer(bundle);
  skipdecode::TextStream stream(tokenizer);
  std::string streamed, wanted;
  library.num_decoded_ids = 0;
  for (int64_t token = 0; token < 4000; ++token) {
    streamed += stream.Add(0x80);
    wanted += "\xEF\xBF\xBD";
  }
  CHECK(library.num_decoded_ids < 4000 * 100);  // 4000 * 4000 / 2 if each token decoded the whole text
  for (const char* letter = "And then there was text again."; *letter != 0; ++letter) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      streamed += stream.Add(*letter);
      wanted += *letter;
    }
  }
  CHECK(streamed.size() > 4000 * 3);
  CHECK(streamed + stream.End() == wanted);
}
